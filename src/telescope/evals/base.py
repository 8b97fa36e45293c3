"""What an eval is: a dataset, a way to put the question, and metrics of the answers.

An eval may stand on an environment (`environment_name`), and then takes from it what it does not define itself: the
dataset, the prompt format, the metrics. Any environment is an eval as it is (`EnvironmentEval`), so that training and
evaluation ask in the same words.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

from telescope.environments.base import (
    ChatMessage,
    EvalMetricsResult,
    MultiTurnEnvironment,
    RolloutState,
    Sample,
    SingleTurnEnvironment,
)
from telescope.errors import UserError


class Eval:
    """Subclass this, set `environment_name` or define `load_dataset` and `compute_eval_metrics`, or both.

    Keyword arguments that the class does not know itself go to the environment. A `system_prompt` of the class or of
    the arguments replaces the environment's.
    """

    environment_name: str | None = None
    environment_kwargs: ClassVar[dict[str, Any]] = {}
    system_prompt: str | None = None
    is_multi_turn: bool = False
    metrics_ranges: dict[str, dict[str, float]] = {}  # noqa: RUF012  # replaced by the environment's, never changed
    tags_options: dict[str, list[str]] = {}  # noqa: RUF012
    reward_min: float | None = None
    reward_max: float | None = None
    keeps_eos_token: bool = False

    # Defaults on the class: a subclass whose __init__ does not call super() works all the same.
    environment: SingleTurnEnvironment | MultiTurnEnvironment | None = None
    _eos_token: str = ""
    _asker: SingleTurnEnvironment | None = None
    _name: str = ""
    _load_arguments: dict[str, Any] | None = None
    _samples: list[Sample] | None = None

    def __init__(self, **kwargs: Any) -> None:
        if kwargs:
            raise UserError(f"{type(self).__name__} has no keyword argument {', '.join(map(repr, kwargs))}.")

    @property
    def name(self) -> str:
        """The name for people; the registry's name unless the subclass overrides it."""
        return self._name or type(self).__name__

    @property
    def uses_chat_template(self) -> bool:
        """Whether prompts go through the chat template; as the environment says, if there is one."""
        return self.environment.uses_chat_template if self.environment is not None else True

    @property
    def eos_token(self) -> str:
        """The tokenizer's end token; the environment is told it as well."""
        return self._eos_token

    @eos_token.setter
    def eos_token(self, token: str) -> None:
        self._eos_token = token
        if self.environment is not None:
            self.environment.eos_token = token

    def load_dataset(self, num_samples: int = -1, **kwargs: Any) -> list[Sample]:
        """All samples, or the first `num_samples`; unless overridden, the environment's."""
        environment = self._require_environment("load_dataset")
        count = len(environment) if num_samples < 0 else min(num_samples, len(environment))
        return [environment.get_sample(index) for index in range(count)]

    def compute_eval_metrics(
        self, completion: str, sample: Sample, eos_token: str = ""
    ) -> EvalMetricsResult | Awaitable[EvalMetricsResult]:
        """Metrics of one completion; unless overridden, the environment's. May be `async`."""
        environment = self._require_environment("compute_eval_metrics")
        assert isinstance(environment, SingleTurnEnvironment), "several turns are scored by compute_rollout_metrics"
        return environment.compute_eval_metrics(completion, sample, eos_token)

    def compute_rollout_metrics(
        self, state: RolloutState, eos_token: str = ""
    ) -> EvalMetricsResult | Awaitable[EvalMetricsResult]:
        """The same for an eval of several turns: metrics of a finished rollout. May be `async`."""
        environment = self._require_environment("compute_rollout_metrics")
        assert isinstance(environment, MultiTurnEnvironment), "single turns are scored by compute_eval_metrics"
        return environment.compute_eval_metrics(state, eos_token)

    def build_messages(self, question: str | Sequence[ChatMessage]) -> list[ChatMessage]:
        """The conversation before the completion, as the environment puts it, if there is one."""
        return self._asking().build_messages(question)

    def format_prompt(self, question: str | list[ChatMessage], tokenizer: Any, **options: Any) -> str:
        """The text that the model continues, as the environment puts it, if there is one."""
        asking = self._asking()
        parameters = inspect.signature(asking.format_prompt).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            options = {name: value for name, value in options.items() if name in parameters}
        return asking.format_prompt(question, tokenizer, **options)

    def __len__(self) -> int:
        return len(self._loaded())

    def get_sample(self, index: int) -> Sample:
        """The sample at `index`; the same one in every process."""
        return self._loaded()[index]

    async def prepare_resources(self) -> None:
        """Awaited once per process before the first completion is scored."""
        if self.environment is not None:
            await self.environment.prepare_resources()

    def _loaded(self) -> list[Sample]:
        if self._samples is None:
            self._samples = list(self.load_dataset(**(self._load_arguments or {})))
        return self._samples

    def _asking(self) -> SingleTurnEnvironment:
        """Who puts the question: the environment, or a plain one with the eval's system prompt."""
        assert not isinstance(self.environment, MultiTurnEnvironment), "an environment of several turns puts its own"
        if self.environment is not None:
            return self.environment
        if self._asker is None:
            self._asker = _PlainQuestion(system_prompt=self.system_prompt)
        return self._asker

    def _require_environment(self, method: str) -> SingleTurnEnvironment | MultiTurnEnvironment:
        if self.environment is None:
            raise UserError(
                f"The eval {self.name!r} defines no {method} and names no environment to take it from. Define it, or "
                "set environment_name."
            )
        return self.environment


class EnvironmentEval(Eval):
    """An environment, asked as an eval."""


class _PlainQuestion(SingleTurnEnvironment):
    """Only puts questions."""

    def load_dataset(self, num_samples: int = -1, **kwargs: Any) -> list[Sample]:
        raise AssertionError("has no dataset")

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> Any:
        raise AssertionError("scores nothing")
