"""Evals, and evals by name: datasets with a prompt format and metrics of the answers.

An eval may wrap an environment (`environment_name`), from which it takes everything that it does not define itself: the
dataset, the prompt format, the metrics, any other attribute. Every environment is also an eval (`EnvironmentEval`), so
training and evaluation use the same prompts.

An eval named `<name>` is `src/telescope/evals/<name>/eval.py`, `<name>/eval.py` in a folder of `environments_path`, an
entry point of the group `telescope.evals`, or `package.module:Class`. Every other name is looked up among the
environments.
"""

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from telescope.environments.arguments import instantiate, known_arguments, refuse_near_misses, refuse_unknown
from telescope.environments.base import (
    ChatMessage,
    Dataset,
    Environment,
    EvalMetricsResult,
    MultiTurnEnvironment,
    RolloutState,
    Sample,
    SingleTurnEnvironment,
)
from telescope.environments.registry import (
    COMPLETION,
    ENVIRONMENTS,
    STATE,
    Discovery,
    Source,
    environment_class,
    make_environment,
    refuse_other_parameters,
)
from telescope.environments.types import EnvironmentSpec
from telescope.environments.user_code import call_with_declared
from telescope.errors import UserError


class Eval(Dataset):
    """An eval. Subclass this and set `environment_name`, or define `load_dataset` and `compute_eval_metrics`, or both.

    Keyword arguments that the class does not take go to the environment. A `system_prompt` of the class or of the
    arguments replaces the environment's. The environment is `env`; attributes that the eval lacks are taken from it.
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

    # Class-level defaults, so that a subclass works even if its __init__ does not call super().
    env: SingleTurnEnvironment | MultiTurnEnvironment | None = None
    _eos_token: str = ""
    _question_format: SingleTurnEnvironment | None = None

    def __init__(self, **kwargs: Any) -> None:
        if kwargs:
            raise UserError(f"{type(self).__name__} has no keyword argument {', '.join(map(repr, kwargs))}.")

    def __getattr__(self, name: str) -> Any:
        """Returns the environment's attribute if the eval has none of that name."""
        if self.env is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.env, name)

    @property
    def uses_chat_template(self) -> bool:
        """Returns whether prompts go through the chat template. The environment decides if there is one."""
        return self.env.uses_chat_template if self.env is not None else True

    @property
    def eos_token(self) -> str:
        """Returns the end token, which is shared with the environment."""
        return self._eos_token if self.env is None else self.env.eos_token

    @eos_token.setter
    def eos_token(self, token: str) -> None:
        self._eos_token = token
        if self.env is not None:
            self.env.eos_token = token

    def load_dataset(self, num_samples: int = -1, **kwargs: Any) -> list[Sample] | None:
        """Returns all samples, or the first `num_samples`. By default they are the environment's.

        An override may call it, with arguments for the environment's `load_dataset`, and then filter `self._samples`.
        """
        environment = self._require_environment("load_dataset")
        if kwargs:
            environment._load_arguments = {**(environment._load_arguments or {}), **kwargs}
            environment._samples = None
        count = len(environment) if num_samples < 0 else min(num_samples, len(environment))
        self._samples = [environment.get_sample(index) for index in range(count)]
        return self._samples

    def compute_eval_metrics(
        self, completion: str, sample: Sample, eos_token: str = ""
    ) -> EvalMetricsResult | Awaitable[EvalMetricsResult]:
        """Returns the metrics of one completion, by default the environment's. May be `async`."""
        environment = self._require_environment("compute_eval_metrics")
        assert isinstance(environment, SingleTurnEnvironment), "compute_rollout_metrics scores multi-turn rollouts"
        return environment.compute_eval_metrics(completion, sample, eos_token)

    def compute_rollout_metrics(
        self, state: RolloutState, eos_token: str = ""
    ) -> EvalMetricsResult | Awaitable[EvalMetricsResult]:
        """Returns the metrics of a finished multi-turn rollout, by default the environment's. May be `async`."""
        environment = self._require_environment("compute_rollout_metrics")
        assert isinstance(environment, MultiTurnEnvironment), "compute_eval_metrics scores single answers"
        return environment.compute_eval_metrics(state, eos_token)

    def build_messages(self, question: str | Sequence[ChatMessage]) -> list[ChatMessage]:
        """Returns the conversation before the completion, formatted by the environment if any."""
        return self._format().build_messages(question)

    def format_prompt(self, question: str | list[ChatMessage], tokenizer: Any, **options: Any) -> str:
        """Returns the text before the completion, formatted by the environment if any."""
        return call_with_declared(self._format().format_prompt, question, tokenizer, **options)

    def _environment_name(self) -> str:
        return self.name if self.env is None else self.env.name

    def _format(self) -> SingleTurnEnvironment:
        """Returns the environment that formats the prompt, by default the question with the eval's system prompt."""
        assert not isinstance(self.env, MultiTurnEnvironment), "a multi-turn environment formats its own prompts"
        if self.env is not None:
            return self.env
        if self._question_format is None:
            self._question_format = _Question(system_prompt=self.system_prompt)
        return self._question_format

    def _require_environment(self, method: str) -> SingleTurnEnvironment | MultiTurnEnvironment:
        if self.env is None:
            fix = (
                f"Create it with get_eval({self.name!r}), which also creates its environment {self.environment_name!r}"
                if self.environment_name
                else f"Define {method}, or set environment_name"
            )
            raise UserError(
                f"The eval {self.name!r} defines no {method} and has no environment to take it from. {fix}."
            )
        return self.env


class EnvironmentEval(Eval):
    """An environment used as an eval."""


class _Question(SingleTurnEnvironment):
    """Formats the questions of an eval without an environment."""

    def load_dataset(self, num_samples: int = -1, **kwargs: Any) -> list[Sample]:
        raise AssertionError("has no dataset")

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> Any:
        raise AssertionError("scores nothing")


EVALS = Discovery("eval", "telescope.evals", Eval)


def list_evals(environments_path: Sequence[str | Path] = ()) -> list[str]:
    """Returns the names of all evals, environments included, sorted. Imports none of them."""
    return sorted({*EVALS.names(environments_path), *ENVIRONMENTS.names(environments_path)})


def check_eval(name: str, environments_path: Sequence[str | Path] = ()) -> Source:
    """Returns the location of `name`, an eval or an environment. Raises `UserError` as `Discovery.check` does."""
    if EVALS.has(name, environments_path):
        return EVALS.check(name, environments_path)
    if ":" not in name and not ENVIRONMENTS.has(name, environments_path):
        raise UserError(EVALS.no_such(name, list_evals(environments_path)))
    return ENVIRONMENTS.check(name, environments_path)


def get_eval(name: str, /, *, environments_path: Sequence[str | Path] = (), **kwargs: Any) -> Eval:
    """Creates an eval. Its dataset is loaded on first use.

    `kwargs` go to the eval's constructor, to its `load_dataset`, or else to its environment, which keeps unknown ones
    as attributes. Misspelled arguments raise `UserError`, as do unknown arguments of an eval without an environment.
    """
    check_eval(name, environments_path)
    cls: type[Eval] = EnvironmentEval
    environment_name: str | None = name
    if EVALS.has(name, environments_path) or not ENVIRONMENTS.has(name, environments_path):
        found = EVALS.load_class(name, environments_path, also=Environment)
        if issubclass(found, Eval):
            cls, environment_name = found, found.environment_name
    own_names = known_arguments(cls, Eval)
    own = own_names | {"system_prompt"}
    environment_type = None
    if environment_name is None:
        refuse_unknown(kwargs, own, f"The eval {name!r}")
    else:
        environment_type = environment_class(environment_name, environments_path)
        if not issubclass(environment_type, SingleTurnEnvironment | MultiTurnEnvironment):
            raise UserError(
                f"The eval {name!r} wraps {environment_name!r}, which is neither a SingleTurnEnvironment nor a "
                "MultiTurnEnvironment."
            )
        refuse_near_misses(kwargs, own | known_arguments(environment_type, Environment), f"The eval {name!r}")

    evaluation: Eval = instantiate(cls, Eval, name, {key: value for key, value in kwargs.items() if key in own_names})
    if "system_prompt" in kwargs:
        evaluation.system_prompt = kwargs["system_prompt"]
    if environment_type is not None and environment_name is not None:
        passed_on = {key: value for key, value in kwargs.items() if key not in own}
        environment = make_environment(environment_type, environment_name, {**cls.environment_kwargs, **passed_on})
        assert isinstance(environment, SingleTurnEnvironment | MultiTurnEnvironment)
        if "system_prompt" in kwargs or evaluation.system_prompt is not None:
            environment.system_prompt = evaluation.system_prompt
        evaluation.env = environment
        evaluation.is_multi_turn = environment.is_multi_turn
        evaluation.metrics_ranges = evaluation.metrics_ranges or environment.metrics_ranges
        evaluation.tags_options = evaluation.tags_options or environment.tags_options
        evaluation.keeps_eos_token = evaluation.keeps_eos_token or environment.keeps_eos_token
    method = "compute_rollout_metrics" if evaluation.is_multi_turn else "compute_eval_metrics"
    refuse_other_parameters(evaluation, name, method, STATE if evaluation.is_multi_turn else COMPLETION)
    return evaluation


def eval_spec(name: str, kwargs: dict[str, Any], *, key: str = "") -> EnvironmentSpec:
    """Returns the eval as a specification of an environment, to be called with `for_eval=True`."""
    return EnvironmentSpec(name, kwargs, key=key, factory="telescope.evals.base:get_eval")
