"""The records that an environment exchanges with Telescope: a dataset item, the state of a conversation, a score.

Environments of users import the classes from `environments.base`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ChatMessage = dict[str, Any]
"""A message for a chat template: `{"role": "user", "content": "..."}`. It may have a `turn_type`."""

Messages = list[ChatMessage]

ENV_NAME_KEY = "_env_name"
"""Key of a sample's metadata with the name of its environment."""


@dataclass
class Sample:
    """One item of a dataset. A `str` prompt becomes the user's message."""

    prompt: str | list[ChatMessage]
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RewardResult:
    """The score of one rollout. `sample_metrics` are numbers to plot, `sample_tags` are strings to filter by."""

    total_reward: float
    sample_metrics: dict[str, float] = field(default_factory=dict)
    golden_answers: dict[str, str | None] = field(default_factory=dict)
    info_turns: list[dict[str, Any]] = field(default_factory=list)
    sample_tags: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class GoldCheck:
    """How a reward reads a sample's reference answer. `problem` says why no completion can equal it."""

    parsed: str
    problem: str | None = None


def shares(*metrics: str) -> dict[str, dict[str, float]]:
    """Returns the `metrics_ranges` of metrics between 0 and 1."""
    return {name: {"min": 0.0, "max": 1.0} for name in metrics}


@dataclass(slots=True)
class EvalMetricsResult:
    """The metrics of one evaluation rollout. The reward is optional."""

    metrics: dict[str, float] = field(default_factory=dict)
    golden_answers: dict[str, str | None] = field(default_factory=dict)
    info_turns: list[dict[str, Any]] = field(default_factory=list)
    sample_tags: dict[str, str] = field(default_factory=dict)


@dataclass
class TrajectoryStep:
    """One turn: the conversation that the model saw, and its completion.

    `completion` is a list with one assistant message, whose content is the decoded text without its end token.
    `completion_logprobs` is as long as `completion_token_ids`, or empty if logprobs were not requested. `is_truncated`:
    the completion was cut off before the model ended it.
    """

    prompt: list[ChatMessage]
    completion: list[ChatMessage]
    prompt_token_ids: list[int] = field(default_factory=list)
    completion_token_ids: list[int] = field(default_factory=list)
    completion_logprobs: list[float] = field(default_factory=list)
    is_truncated: bool = False

    @property
    def text(self) -> str:
        """Returns the completion as text."""
        texts = [str(message["content"]) for message in self.completion]
        return texts[0] if len(texts) == 1 else "".join(texts)


@dataclass
class RolloutState:
    """State of one multi-turn rollout. `custom` belongs to the environment.

    A state is created, changed and scored in one process and never leaves it, so `custom` may hold any object.
    """

    sample: Sample
    env_name: str
    trajectory: list[TrajectoryStep] = field(default_factory=list)
    is_completed: bool = False
    stop_reason: str | None = None
    error: str | None = None
    custom: dict[str, Any] = field(default_factory=dict)
    tool_records: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls since the last answer, for the record of the run (`ToolCall.record`)."""

    @property
    def num_turns(self) -> int:
        """Returns the number of completions so far."""
        return len(self.trajectory)

    def get_full_completion_ids(self) -> list[int]:
        """Returns the token ids of all completions in order."""
        return [token_id for step in self.trajectory for token_id in step.completion_token_ids]

    def get_full_logprobs(self) -> list[float]:
        """Returns the logprobs of all completions in order, one per completion id if they were requested."""
        return [logprob for step in self.trajectory for logprob in step.completion_logprobs]


def conversation(state: RolloutState) -> list[ChatMessage]:
    """Returns the last turn's prompt and answer as messages. Empty before the first answer."""
    if not state.trajectory:
        return []
    last = state.trajectory[-1]
    return [*last.prompt, *last.completion]


def assistant_message(text: str) -> ChatMessage:
    return {"role": "assistant", "content": text}


def eval_metrics_of(result: RewardResult) -> EvalMetricsResult:
    """Converts a reward to eval metrics: its sample metrics, and `reward`."""
    return EvalMetricsResult(
        metrics={"reward": result.total_reward, **result.sample_metrics},
        golden_answers=result.golden_answers,
        info_turns=result.info_turns,
        sample_tags=result.sample_tags,
    )
