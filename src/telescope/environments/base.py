"""What an environment is: a dataset of prompts and a way to score the answers.

This module owns the classes that users subclass and the records that they exchange with Telescope. It does not find
environments (`registry`), does not run them (`pool`, `worker`), and imports nothing heavy: writing and testing an
environment needs neither torch nor Ray nor vLLM.

Invariants:
- An environment object is shared by all rollouts of its process, so nothing about one rollout is kept on it: what a
  rollout of several turns remembers is in its `RolloutState`.
- `get_sample(index)` is the same sample in every process and at every call; a dataset that is drawn at random is drawn
  from a seed.
- Scoring methods may be plain or `async`; Telescope calls both outside the driver process.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from telescope.environments.arguments import check_arguments, load_arguments
from telescope.errors import UserError

ChatMessage = dict[str, Any]
"""A message as chat templates take it: `{"role": "user", "content": "..."}`."""

THINKING_PREFIX = "<think>\n"
"""What `add_thinking_prefix` puts after the generation prompt."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Sample:
    """One item of a dataset. A `prompt` of type str becomes the user's message."""

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


@dataclass(slots=True)
class EvalMetricsResult:
    """The metrics of one rollout of an evaluation, which need not be a reward."""

    metrics: dict[str, float] = field(default_factory=dict)
    golden_answers: dict[str, str | None] = field(default_factory=dict)
    info_turns: list[dict[str, Any]] = field(default_factory=list)
    sample_tags: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class TrajectoryStep:
    """One turn of a rollout: the conversation that the model saw and what it answered.

    `completion` is the decoded text without its end token. `completion_logprobs` is as long as `completion_token_ids`,
    or empty where nobody asked for them. `is_truncated`: the answer was cut off before the model ended it.
    """

    prompt: list[ChatMessage]
    completion: str
    prompt_token_ids: list[int] = field(default_factory=list)
    completion_token_ids: list[int] = field(default_factory=list)
    completion_logprobs: list[float] = field(default_factory=list)
    is_truncated: bool = False


@dataclass(slots=True)
class RolloutState:
    """All that is remembered of one rollout of several turns. `custom` is the environment's own.

    It is made, changed and scored in one process and never leaves it, so `custom` may hold anything.
    """

    sample: Sample
    env_name: str
    trajectory: list[TrajectoryStep] = field(default_factory=list)
    is_completed: bool = False
    stop_reason: str | None = None
    error: str | None = None
    custom: dict[str, Any] = field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        """Answers of the model so far."""
        return len(self.trajectory)


def sample_uid(sample: Sample) -> str:
    """Identity of a dataset item: 16 hex digits over prompt, answer and metadata.

    It does not depend on the environment's name or on the position in the dataset, so that an evaluation item is
    recognised in a training set whatever either of them is called.
    """
    content = [sample.prompt, sample.answer, sample.metadata]
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, default=repr, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Environment(ABC):
    """A dataset and a reward. Subclass `SingleTurnEnvironment` or `MultiTurnEnvironment` rather than this.

    Class attributes that a subclass may set: `reward_min` and `reward_max` (expected range of the reward, for charts),
    `metrics_ranges` (`{"correct": {"min": 0.0, "max": 1.0}}`, likewise), `tags_options` (values that a tag takes),
    `uses_chat_template` (False: the prompt goes to the model as plain text), `keeps_eos_token` (True: the completion
    that is scored still ends with the end token, if the model wrote one).
    """

    reward_min: float | None = None
    reward_max: float | None = None
    metrics_ranges: ClassVar[dict[str, dict[str, float]]] = {}
    tags_options: ClassVar[dict[str, list[str]]] = {}
    eos_token: str = ""
    """The tokenizer's end token, set before the first rollout; empty when there is no tokenizer."""
    uses_chat_template: bool = True
    keeps_eos_token: bool = False
    resources_per: ClassVar[Literal["host", "process"]] = "host"

    # Defaults on the class: a subclass whose __init__ does not call super() works all the same.
    _name: str = ""
    _load_arguments: dict[str, Any] | None = None
    _samples: list[Sample] | None = None
    _notices: tuple[str, ...] = ()

    def __init__(self, **kwargs: Any) -> None:
        """Takes what the subclass left over: arguments of `load_dataset`. Raises `UserError` for unknown ones."""
        check_arguments(type(self), kwargs, Environment)
        self._load_arguments = load_arguments(type(self), kwargs, Environment)

    @property
    def name(self) -> str:
        """The name for people; the registry's name unless the subclass overrides it."""
        return self._name or type(self).__name__

    @property
    def is_multi_turn(self) -> bool:
        return False

    @abstractmethod
    def load_dataset(self, num_samples: int = -1, **kwargs: Any) -> list[Sample]:
        """All samples, or the first `num_samples` of them when that is not negative."""

    def __len__(self) -> int:
        return len(self._loaded())

    def get_sample(self, index: int) -> Sample:
        """The sample at `index`; the same one in every process."""
        return self._loaded()[index]

    def _loaded(self) -> list[Sample]:
        if self._samples is None:
            self._samples = list(self.load_dataset(**(self._load_arguments or {})))
        return self._samples

    def notice(self, text: str) -> None:
        """Have a run say `text` before it trains, and record it: for what its user has to know of this environment.

        Call it from the constructor or from `load_dataset`; later it only goes to the log.
        """
        logger.warning("%s", text)
        self._notices = (*self._notices, text)

    async def prepare_resources(self) -> None:
        """Awaited before the first completion is handed over: start a pool of sandboxes, open connections.

        An environment that overrides this is played in one process of a host, so that the host has its resources once;
        with `resources_per = "process"` every process plays it and prepares resources of its own.
        """
        return None

    async def close_resources(self) -> None:
        """Awaited when the process ends in good order; it has some seconds. After a crash it is not called."""
        return None


class SingleTurnEnvironment(Environment):
    """One prompt, one completion, one reward.

    `system_prompt` is the system message and `instruction_prompt` follows the question in the user's message; either
    may be None. With `add_thinking_prefix` the model goes on after an opening `<think>`, which is part of the prompt
    and not of the completion that is scored.
    """

    system_prompt: str | None = None
    instruction_prompt: str | None = None
    add_thinking_prefix: bool = False

    def __init__(
        self,
        system_prompt: str | None = None,
        instruction_prompt: str | None = None,
        add_thinking_prefix: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.system_prompt = system_prompt
        self.instruction_prompt = instruction_prompt
        self.add_thinking_prefix = add_thinking_prefix

    @abstractmethod
    def compute_reward(
        self, completion: str, sample: Sample, eos_token: str = ""
    ) -> RewardResult | Awaitable[RewardResult]:
        """Score `completion`, the text after the prompt. May be `async`."""

    def compute_eval_metrics(
        self, completion: str, sample: Sample, eos_token: str = ""
    ) -> EvalMetricsResult | Awaitable[EvalMetricsResult]:
        """Metrics of an evaluation; unless overridden, the reward's `sample_metrics` and the reward itself."""
        result = self.compute_reward(completion, sample, eos_token)
        if isinstance(result, RewardResult):
            return eval_metrics_of(result)
        return _eval_metrics_later(result)

    def build_messages(self, question: str | Sequence[ChatMessage]) -> list[ChatMessage]:
        """The conversation before the completion.

        A question of type str gets the instruction after a blank line. A list of messages is taken as it is, with the
        system prompt put first unless it has one of its own.
        """
        if isinstance(question, str):
            content = f"{question}\n\n{self.instruction_prompt}" if self.instruction_prompt else question
            messages: list[ChatMessage] = [{"role": "user", "content": content}]
        else:
            messages = [dict(message) for message in question]
        if self.system_prompt and not (messages and messages[0].get("role") == "system"):
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def format_prompt(
        self,
        question: str | list[ChatMessage],
        tokenizer: Any,
        enable_thinking: bool = False,
        chat_template: str | None = None,
    ) -> str:
        """The text that the model continues.

        `tokenizer` is anything with transformers' `apply_chat_template`; `chat_template` replaces its own template;
        `enable_thinking` is handed to the template. Without a chat template (`uses_chat_template = False`) the parts
        are joined by blank lines.
        """
        messages = self.build_messages(question)
        if self.uses_chat_template:
            options: dict[str, Any] = {} if chat_template is None else {"chat_template": chat_template}
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking, **options
            )
        else:
            text = "\n\n".join(str(message["content"]) for message in messages)
        if self.add_thinking_prefix and not text.rstrip().endswith(THINKING_PREFIX.rstrip()):
            text += THINKING_PREFIX
        return text


class MultiTurnEnvironment(Environment):
    """A conversation: the model answers, the environment replies, until it is done, and then the whole is scored.

    After each answer, which is then the last of `state.trajectory`: `is_done`; if not, `env_response` and again
    `is_done`; if not, the conversation of `get_next_prompt_messages` goes to the model. An answer that was cut off ends
    the rollout, unless `continues_after_truncation`. All methods may be plain or `async`.
    """

    max_turns: int = 10
    system_prompt: str | None = None
    continues_after_truncation: bool = False

    def __init__(self, max_turns: int = 10, system_prompt: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if max_turns < 1:
            raise UserError(f"{type(self).__name__}: max_turns is {max_turns}; use 1 or more.")
        self.max_turns = max_turns
        self.system_prompt = system_prompt

    @property
    def is_multi_turn(self) -> bool:
        return True

    def create_initial_state(self, sample: Sample) -> RolloutState:
        """The memory of a new rollout. Override it to fill `custom`."""
        return RolloutState(sample=sample, env_name=self.name)

    def get_initial_prompt(self, sample: Sample, tokenizer: Any = None) -> list[ChatMessage]:
        """The first conversation; the same at every call, because all rollouts of a group share it."""
        if isinstance(sample.prompt, str):
            messages: list[ChatMessage] = [{"role": "user", "content": sample.prompt}]
        else:
            messages = [dict(message) for message in sample.prompt]
        if self.system_prompt and not (messages and messages[0].get("role") == "system"):
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    @abstractmethod
    def env_response(
        self, messages: list[ChatMessage], state: RolloutState
    ) -> list[ChatMessage] | Awaitable[list[ChatMessage]]:
        """What the environment says to `messages`, the conversation up to and with the model's last answer."""

    def is_done(self, state: RolloutState) -> tuple[bool, str | None]:
        """Whether the rollout ends here, and a word for why, which is recorded."""
        if state.num_turns >= self.max_turns:
            return True, "max_turns"
        return False, None

    def get_next_prompt_messages(
        self, state: RolloutState, env_response_messages: list[ChatMessage]
    ) -> list[ChatMessage]:
        """The conversation of the next turn: unless overridden, all that was said and the environment's response."""
        return [*conversation(state), *env_response_messages]

    @abstractmethod
    def compute_reward(self, state: RolloutState, eos_token: str = "") -> RewardResult | Awaitable[RewardResult]:
        """Score the finished rollout."""

    def compute_eval_metrics(
        self, state: RolloutState, eos_token: str = ""
    ) -> EvalMetricsResult | Awaitable[EvalMetricsResult]:
        """Metrics of an evaluation; unless overridden, the reward's `sample_metrics` and the reward itself."""
        result = self.compute_reward(state, eos_token)
        if isinstance(result, RewardResult):
            return eval_metrics_of(result)
        return _eval_metrics_later(result)

    def end_rollout(self, state: RolloutState) -> Awaitable[None] | None:
        """Called once when a rollout is over (scored, failed or cancelled): give back what `state` holds."""
        return None


def notices_of(environment: Any) -> list[str]:
    """What an environment has said by `notice`; of an eval, what the environment that it stands on has said."""
    owners = (environment, getattr(environment, "environment", None))
    return [text for owner in owners if isinstance(owner, Environment) for text in owner._notices]


def conversation(state: RolloutState) -> list[ChatMessage]:
    """The last turn's prompt and answer as messages; empty before the first answer."""
    if not state.trajectory:
        return []
    last = state.trajectory[-1]
    return [*last.prompt, {"role": "assistant", "content": last.completion}]


def eval_metrics_of(result: RewardResult) -> EvalMetricsResult:
    """A reward seen as the metrics of an evaluation: its sample metrics, and `reward`."""
    return EvalMetricsResult(
        metrics={"reward": result.total_reward, **result.sample_metrics},
        golden_answers=result.golden_answers,
        info_turns=result.info_turns,
        sample_tags=result.sample_tags,
    )


async def _eval_metrics_later(pending: Awaitable[RewardResult]) -> EvalMetricsResult:
    return eval_metrics_of(await pending)


BaseEnvironment = Environment
"""The older name of `Environment`."""
