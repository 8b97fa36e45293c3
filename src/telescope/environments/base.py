"""What an environment is: a dataset of prompts and a way to score the answers.

This module owns the classes that users subclass and the records that they exchange with Telescope. It does not find
environments (`registry`), does not run them (`pool`, `worker`), and imports nothing heavy: writing and testing an
environment needs neither torch nor Ray nor vLLM.

Invariants:
- An environment object is shared by all rollouts of its process, so nothing about one rollout is kept on it.
- `get_sample(index)` is the same sample in every process and at every call; a dataset that is drawn at random is drawn
  from a seed.
- Scoring methods may be plain or `async`; Telescope calls both outside the driver process.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from telescope.environments.arguments import check_arguments, load_arguments

ChatMessage = dict[str, Any]
"""A message as chat templates take it: `{"role": "user", "content": "..."}`."""

THINKING_PREFIX = "<think>\n"
"""What `add_thinking_prefix` puts after the generation prompt."""


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


def sample_uid(sample: Sample) -> str:
    """Identity of a dataset item: 16 hex digits over prompt, answer and metadata.

    It does not depend on the environment's name or on the position in the dataset, so that an evaluation item is
    recognised in a training set whatever either of them is called.
    """
    content = [sample.prompt, sample.answer, sample.metadata]
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, default=repr, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Environment(ABC):
    """A dataset and a reward. Subclass `SingleTurnEnvironment` rather than this.

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

    # Defaults on the class: a subclass whose __init__ does not call super() works all the same.
    _name: str = ""
    _load_arguments: dict[str, Any] | None = None
    _samples: list[Sample] | None = None

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

    async def prepare_resources(self) -> None:
        """Awaited once per process before the first rollout: open connections, warm caches."""
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
