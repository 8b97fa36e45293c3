"""Evals by name.

`src/telescope/evals/<name>/eval.py` is an eval called `<name>`, and so is `<name>/eval.py` in any folder of
`environments_path`, an entry point of the group `telescope.evals`, and `package.module:Class`. Every other name is
looked up among the environments, each of which is also an eval.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telescope.environments.arguments import instantiate, known_arguments, refuse_near_misses, refuse_unknown
from telescope.environments.base import Environment, MultiTurnEnvironment, SingleTurnEnvironment
from telescope.environments.registry import ENVIRONMENTS, Discovery, Source, environment_class, make_environment
from telescope.environments.worker_pool.messages import EnvironmentSpec
from telescope.errors import UserError
from telescope.evals.base import EnvironmentEval, Eval

EVALS = Discovery(
    kind="eval",
    package="telescope.evals",
    file_name="eval.py",
    group="telescope.evals",
    path_field="environments_path",
    root=Eval,
)


def list_evals(environments_path: Sequence[str | Path] = ()) -> list[str]:
    """Names of all evals, environments included, sorted. Imports none of them."""
    return sorted({*EVALS.names(environments_path), *ENVIRONMENTS.names(environments_path)})


def check_eval(name: str, environments_path: Sequence[str | Path] = ()) -> Source:
    """The location of `name`, an eval or an environment. Raises `UserError` as `check_environment` does."""
    if EVALS.has(name, environments_path):
        return EVALS.check(name, environments_path)
    if ":" not in name and not ENVIRONMENTS.has(name, environments_path):
        raise UserError(EVALS.no_such(name, list_evals(environments_path)))
    return ENVIRONMENTS.check(name, environments_path)


def get_eval(name: str, /, *, environments_path: Sequence[str | Path] = (), **kwargs: Any) -> Eval:
    """Makes an eval. Its dataset is loaded when it is first needed.

    `kwargs` go to the eval's constructor, to its `load_dataset`, or else to its environment, which keeps those that it
    does not know as attributes. Misspelled ones raise `UserError`, as do unknown ones of an eval without environment.
    """
    check_eval(name, environments_path)
    if ":" not in name and not EVALS.has(name, environments_path):
        return _make_eval(EnvironmentEval, name, kwargs, environments_path, name)
    cls = EVALS.load_class(name, environments_path, also=Environment)
    if issubclass(cls, Eval):
        return _make_eval(cls, name, kwargs, environments_path, cls.environment_name)
    return _make_eval(EnvironmentEval, name, kwargs, environments_path, name)


def eval_spec(name: str, kwargs: dict[str, Any], *, key: str = "") -> EnvironmentSpec:
    """The eval as a specification for `EnvironmentPool`, to be called with `for_eval=True`."""
    return EnvironmentSpec(name, kwargs, key=key, factory="telescope.evals.registry:get_eval")


def _make_eval(
    cls: type[Eval],
    name: str,
    kwargs: dict[str, Any],
    environments_path: Sequence[str | Path],
    environment_name: str | None,
) -> Eval:
    """An instance of `cls` with the environment that it wraps, if any."""
    own = known_arguments(cls, Eval) | {"system_prompt"}
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

    evaluation: Eval = instantiate(cls, Eval, name, {key: value for key, value in kwargs.items() if key in own})
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
    return evaluation
