"""The tokens of one sample, turn by turn, and its score.

A trajectory is token ids, never text: each turn keeps the ids that the engine sampled, each with its logprob and policy
version, and the ids that the environment added. Concatenated they are the next prompt and, at the end, the training
sequence. Text is only for people and parsers.

Turns form a tree: a turn extends its parent's conversation, or begins a conversation with a whole prompt. A rollout
that branches, opens several conversations or shortens its history has several training sequences, one for each turn
that no other extends. Each sampled token is trained in one of them; in others it is context.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from telescope.environments.types import CONTEXT_EXHAUSTED, RewardRecord
from telescope.inference.base import Generation
from telescope.record.convert import Batch
from telescope.trainer.batch import TrainSample


@dataclass(slots=True)
class Turn:
    """One completion of the model.

    It has the ids added since its parent's completion (without a parent, the whole prompt) and the sampled ids.
    `replies` are the messages before this completion, each (role, text, turn_type), the last optional. `divergence`
    names how the join before this turn differs from the chat template, or why a later turn begins a conversation or a
    branch (`rendering`, `joins`). Times are wall-clock.
    """

    added_token_ids: list[int]
    generation: Generation
    text: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0
    parent: int | None = None
    """Index of the turn that it extends."""
    renders_again: bool = False
    """Whether its prompt, without a parent, is an earlier conversation of its chat, changed or rendered again."""
    chat: str = ""
    """Name of its conversation."""
    trained: bool = True
    replies: list[tuple[str, ...]] = field(default_factory=list)
    divergence: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls in this completion, as `ToolCall.record` returns them."""
    server: int = -1
    slot: int = -1


@dataclass(slots=True)
class Totals:
    """Totals over a sample's turns. `longest_answer` and `finish_reason` leave out judge calls and simulated users."""

    num_turns: int
    num_prompt_tokens: int
    """Tokens of the first prompt."""
    num_completion_tokens: int
    """Sampled tokens in all turns."""
    num_environment_tokens: int
    """Tokens that the environment added after the first prompt: replies, prompts of other conversations, and where a
    prompt renders an earlier conversation again the tokens beyond it."""
    longest_answer: int
    """Tokens of the longest completion."""
    finish_reason: str
    version_range: tuple[int, int]
    """The oldest and newest policy version of the trained tokens, or (-1, -1)."""
    divergences: dict[str, int]
    """Number of forks and of joins that differ from the chat template, by name."""

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens in prompt, completions and environment messages."""
        return self.num_prompt_tokens + self.num_completion_tokens + self.num_environment_tokens


@dataclass
class Trajectory:
    """One sample of a group.

    `reward` is None while the sample runs, and if it failed (`failure_kind`). A sample that failed, or that a filter
    removed, is masked.
    """

    sample_id: str
    group_id: int
    sample_index: int
    environment: str
    turns: list[Turn] = field(default_factory=list)
    reward: RewardRecord | None = None
    failure_kind: str | None = None
    failure_message: str | None = None
    end_reason: str | None = None
    """The environment's reason for ending the conversation, if it gave one."""
    cancelled: bool = False
    """Cancelled because its group became too old; then neither scored nor masked."""
    filtered_by: str | None = None
    """The filter that removed a scored sample from training."""
    training_reward: float | None = None
    """Reward for its advantage, after scaling and penalty; None: the total reward."""
    penalty: float = 0.0
    """Overlong penalty, subtracted from the training reward."""
    compression_ratio: float = 0.0
    """Its text's `compression_ratio`: prose 2 to 3, a loop over 10. 0 until it is scored."""
    chat_rewards: dict[str, float] = field(default_factory=dict)
    """Rewards of conversations that have their own."""
    num_infrastructure_retries: int = 0
    failed_requests: list[int | None] = field(default_factory=list)
    """Tokens of each failed request. None if the engine ended before it reported them."""
    lost_conversations: list[int] = field(default_factory=list)
    """Tokens of each conversation that began again because its state was lost."""
    payload: Any = None
    """Further data of its tokens besides their ids (`GenerateRequest.payload`)."""
    folded: Totals | None = None
    """Totals over its turns, once it is folded."""
    parts: list[TrainSample] = field(default_factory=list)
    """Its sequences, once it is folded."""
    rows: dict[str, Batch] = field(default_factory=dict)
    """Its rows of the record's tables, once the driver has it (`sample_rows`)."""
    server_index: int = -1
    slot: int = -1
    started_at: float = 0.0
    agent_started_at: float | None = None
    """When its environment's own `rollout` began."""
    generated_at: float = 0.0
    finished_at: float = 0.0

    @property
    def total_reward(self) -> float:
        assert self.reward is not None and self.reward.total_reward is not None, (
            f"sample {self.sample_id} has no reward"
        )
        return self.reward.total_reward

    @property
    def is_usable(self) -> bool:
        """Returns whether the sample is scored and no filter removed it."""
        return self.reward is not None and self.filtered_by is None

    @property
    def mask_reason(self) -> str | None:
        """Returns why it is masked: its failure, or the filter that removed it."""
        return self.failure_kind or self.filtered_by

    @property
    def totals(self) -> Totals:
        return self.folded or self._totals()

    @property
    def num_sampled_tokens(self) -> int:
        """Returns the number of sampled tokens, including failed requests and lost conversations."""
        failed = sum(length for length in self.failed_requests if length is not None)
        return self.totals.num_completion_tokens + failed + sum(self.lost_conversations)

    def fold(self) -> None:
        """Replaces an ended sample's turns by totals and sequences, which take memory only for the tokens."""
        self.folded, self.parts, self.turns = self._totals(), self.sequences() if self.turns else [], []

    def _totals(self) -> Totals:
        environment = 0
        lengths: list[int] = []
        ends: dict[str, int] = {}
        """Length of the newest conversation of each chat, whose tokens a prompt that is rendered again repeats."""
        sampled = [len(turn.generation.token_ids_N) for turn in self.turns]
        for index, turn in enumerate(self.turns):
            added = len(turn.added_token_ids)
            repeated = ends.get(turn.chat, 0) if turn.renders_again else 0
            environment += max(added - repeated, 0) if index else 0
            lengths.append((0 if turn.parent is None else lengths[turn.parent]) + added + sampled[index])
            ends[turn.chat] = lengths[-1]
        answers = self.answers
        versions = [span[0] for turn in answers if turn.trained for span in turn.generation.version_spans]
        return Totals(
            num_turns=len(self.turns),
            num_prompt_tokens=len(self.turns[0].added_token_ids) if self.turns else 0,
            num_completion_tokens=sum(sampled),
            num_environment_tokens=environment,
            longest_answer=max((len(turn.generation.token_ids_N) for turn in answers), default=0),
            finish_reason=answers[-1].generation.finish_reason if answers else "",
            version_range=(min(versions), max(versions)) if versions else (-1, -1),
            divergences=Counter(turn.divergence for turn in self.turns if turn.divergence is not None),
        )

    def relabel(self, label: Callable[[int], int]) -> None:
        """Changes the policy versions of its tokens. `label` must keep -1, which marks tokens that were not sampled."""
        for turn in self.turns:
            spans = turn.generation.version_spans
            turn.generation.version_spans = [(label(version), first, end) for version, first, end in spans]
        for part in self.parts:
            part.version_L = np.array([label(version) for version in part.version_L.tolist()], dtype=np.int32)
        if self.folded is not None and self.folded.version_range[0] >= 0:
            known = {version for part in self.parts for version in part.version_L[part.trained_L].tolist()}
            self.folded.version_range = min(known), max(known)

    def path(self, index: int) -> list[int]:
        """Returns the turn indices of a conversation, from its first turn to the turn at `index`."""
        path: list[int] = []
        at: int | None = index
        while at is not None:
            path.append(at)
            at = self.turns[at].parent
        return path[::-1]

    @property
    def hit_length_limit(self) -> bool:
        """Returns whether the length or context limit cut it off."""
        return self.stop_reason in ("length", CONTEXT_EXHAUSTED)

    @property
    def stop_reason(self) -> str:
        """Returns `length` if the last completion was cut off, else the environment's or engine's reason."""
        finish_reason = self.totals.finish_reason
        return finish_reason if finish_reason == "length" else self.end_reason or finish_reason

    @property
    def answers(self) -> list[Turn]:
        """Returns the turns that are trained, or all if none is. Filters and penalties use only these."""
        return [turn for turn in self.turns if turn.trained] or self.turns

    @property
    def completion_text(self) -> str:
        return "\n".join(turn.text for turn in self.answers)

    def sequences(self) -> list[TrainSample]:
        """Returns its token sequences in order, one for each turn that no other extends.

        Each has token ids and, per token, a trained flag, the engine's logprob and the policy version; no reward. A
        sampled token is trained in the first sequence that has it. The trajectory must have a turn.
        """
        if self.folded is not None:
            return self.parts
        inner = {turn.parent for turn in self.turns}
        leaves = [index for index in range(len(self.turns)) if index not in inner]
        done: set[int] = set()
        return [
            self._sequence(f"{self.sample_id}/{part}" if len(leaves) > 1 else self.sample_id, self.path(leaf), done)
            for part, leaf in enumerate(leaves)
        ]

    def _sequence(self, sample_id: str, path: list[int], done: set[int]) -> TrainSample:
        """Returns the sequence of a path. Trains the turns that are not in `done`, and adds them to it."""
        ids, trained, logprobs, versions = [], [], [], []
        turns = [self.turns[index] for index in path]
        for index, turn in zip(path, turns, strict=True):
            num_added = len(turn.added_token_ids)
            num_sampled = len(turn.generation.token_ids_N)
            ids += [np.asarray(turn.added_token_ids, dtype=np.int32), turn.generation.token_ids_N.astype(np.int32)]
            trained += [np.zeros(num_added, dtype=bool), np.full(num_sampled, turn.trained and index not in done)]
            logprobs += [np.zeros(num_added, dtype=np.float32), turn.generation.logprobs_N.astype(np.float32)]
            versions += [np.full(num_added, -1, dtype=np.int32), turn.generation.version_N]
        done.update(path)
        return TrainSample(
            sample_id=sample_id,
            group_id=self.group_id,
            environment=self.environment,
            token_ids_L=np.concatenate(ids),
            trained_L=np.concatenate(trained),
            engine_logprob_L=np.concatenate(logprobs),
            version_L=np.concatenate(versions),
            reward=math.nan,
            routes_LXK=_joined_routes(turns),
            payload=self.payload,
            chat=turns[-1].chat,
        )


def compression_ratio(text: str) -> float:
    """Returns a text's bytes over its zlib-compressed bytes. Empty text: 0, prose: 2 to 3, a loop: over 10."""
    data = text.encode("utf-8", errors="replace")
    return len(data) / len(zlib.compress(data)) if data else 0.0


def _joined_routes(turns: list[Turn]) -> np.ndarray | None:
    """Returns the routes of a sequence's tokens [L, X, K], zero where none are recorded. None if no turn has any.

    A completion has the routes of its whole prompt too. A token keeps the routes of the first completion that has them,
    because its successor was sampled under these. The last sampled token of a turn gets its routes from the next turn's
    prompt.
    """
    recorded = [turn.generation.routes_MXK for turn in turns]
    known = [routes for routes in recorded if routes is not None and len(routes)]
    if not known:
        return None
    length = sum(len(turn.added_token_ids) + len(turn.generation.token_ids_N) for turn in turns)
    routes_LXK = np.zeros((length, *known[0].shape[1:]), dtype=known[0].dtype)
    end, filled = 0, 0
    for turn, routes in zip(turns, recorded, strict=True):
        end += len(turn.added_token_ids) + len(turn.generation.token_ids_N)
        if routes is None:
            continue
        last = end - 1
        first = max(filled, last - len(routes))
        if first < last:
            routes_LXK[first:last] = routes[len(routes) - (last - first) :]
            filled = last
    return routes_LXK
