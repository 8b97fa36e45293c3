"""The tokens of one sample, turn by turn, and what the environment said of them.

A trajectory is token ids, never text: each turn keeps the ids that the engine sampled, with their logprobs and the
policy version of each, and the ids of what the environment added. Their concatenation is the next prompt and, at the
end, the training sequence. Text is there for people and parsers only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from telescope.environments.records import RewardRecord
from telescope.rollout.types import Generation
from telescope.trainer.batch import TrainSample


@dataclass(slots=True)
class Turn:
    """One answer of the model: the ids that preceded it since the last answer, and the ids it sampled."""

    added_token_ids: list[int]
    generation: Generation
    text: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0


@dataclass
class Trajectory:
    """One sample of a group.

    `reward` stays None while it is open and when it is masked (then `failure_kind` says why).
    """

    sample_id: str
    group_id: int
    sample_index: int
    environment: str
    turns: list[Turn] = field(default_factory=list)
    reward: RewardRecord | None = None
    failure_kind: str | None = None
    failure_message: str | None = None
    cancelled: bool = False
    """Given up because its group became too old; then neither scored nor masked."""
    num_infrastructure_retries: int = 0
    server_index: int = -1
    lane: int = -1
    started_at: float = 0.0
    generated_at: float = 0.0
    finished_at: float = 0.0

    @property
    def total_reward(self) -> float:
        assert self.reward is not None and self.reward.total_reward is not None, (
            f"sample {self.sample_id} has no reward"
        )
        return self.reward.total_reward

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the first prompt."""
        return len(self.turns[0].added_token_ids) if self.turns else 0

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(len(turn.generation.token_ids_N) for turn in self.turns)

    @property
    def stop_reason(self) -> str:
        return self.turns[-1].generation.finish_reason if self.turns else ""

    @property
    def version_range(self) -> tuple[int, int]:
        """Oldest and newest policy version among the sampled tokens, (-1, -1) when there are none."""
        spans = [span for turn in self.turns for span in turn.generation.version_spans]
        if not spans:
            return -1, -1
        return min(span[0] for span in spans), max(span[0] for span in spans)

    @property
    def completion_text(self) -> str:
        return "\n".join(turn.text for turn in self.turns)

    def next_prompt(self, added_token_ids: list[int]) -> list[int]:
        """All ids so far followed by `added_token_ids`: the prompt of the next turn."""
        ids: list[int] = []
        for turn in self.turns:
            ids.extend(turn.added_token_ids)
            ids.extend(turn.generation.token_ids_N.tolist())
        ids.extend(added_token_ids)
        return ids

    def to_train_sample(self) -> TrainSample:
        """The trainer's view: ids with a trained flag, the engine's logprob and the policy version of each token."""
        ids, trained, logprobs, versions = [], [], [], []
        for turn in self.turns:
            num_added = len(turn.added_token_ids)
            num_sampled = len(turn.generation.token_ids_N)
            ids += [np.asarray(turn.added_token_ids, dtype=np.int32), turn.generation.token_ids_N.astype(np.int32)]
            trained += [np.zeros(num_added, dtype=bool), np.ones(num_sampled, dtype=bool)]
            logprobs += [np.zeros(num_added, dtype=np.float32), turn.generation.logprobs_N.astype(np.float32)]
            versions += [np.full(num_added, -1, dtype=np.int32), turn.generation.version_N]
        return TrainSample(
            sample_id=self.sample_id,
            group_id=self.group_id,
            environment=self.environment,
            token_ids_L=np.concatenate(ids),
            trained_L=np.concatenate(trained),
            engine_logprob_L=np.concatenate(logprobs),
            version_L=np.concatenate(versions),
            reward=self.total_reward,
        )
