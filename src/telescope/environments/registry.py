"""Environments by name.

`src/telescope/environments/<name>/environment.py` is an environment called `<name>`, and so is `<name>/environment.py`
in any folder of `environments_path`, an entry point of the group `telescope.environments`, and `package.module:Class`.
There is nothing to register. How names are looked up is `discovery`'s matter; this module owns how one is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telescope.environments.arguments import check_arguments, instantiate
from telescope.environments.base import Environment, MultiTurnEnvironment, SingleTurnEnvironment
from telescope.environments.discovery import Discovery, Packages, Source
from telescope.errors import UserError

ENVIRONMENTS = Discovery(
    kind="environment",
    package="telescope.environments",
    file_name="environment.py",
    group="telescope.environments",
    path_field="environments_path",
    root=Environment,
)


def list_environments(environments_path: Sequence[str | Path] = ()) -> list[str]:
    """Names of all environments that can be found, sorted. Imports none of them."""
    return ENVIRONMENTS.names(environments_path)


def check_environment(name: str, environments_path: Sequence[str | Path] = ()) -> Source:
    """Where `name` leads. Raises `UserError` when nowhere (with the nearest name), or when a required package is
    missing (with the install command). Imports no environment."""
    return ENVIRONMENTS.check(name, environments_path)


def missing_packages(name: str, environments_path: Sequence[str | Path] = ()) -> Packages:
    """Required and optional packages of `name` that are not installed."""
    return ENVIRONMENTS.packages(ENVIRONMENTS.find(name, environments_path))


def environment_class(name: str, environments_path: Sequence[str | Path] = ()) -> type[Environment]:
    """The class, imported. Raises `UserError` as `check_environment` does, and when the import fails.

    One that stands on `Environment` (or `BaseEnvironment`) itself and has a `compute_reward` is a single-turn
    environment, and comes as a subclass of `SingleTurnEnvironment`.
    """
    cls: type[Environment] = ENVIRONMENTS.load_class(name, environments_path)
    if issubclass(cls, SingleTurnEnvironment | MultiTurnEnvironment):
        return cls
    if not callable(getattr(cls, "compute_reward", None)):
        raise UserError(
            f"The environment {name!r} has no compute_reward: {cls.__name__} stands on {Environment.__name__} itself. "
            "Subclass SingleTurnEnvironment or MultiTurnEnvironment (telescope.environments.base)."
        )
    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, SingleTurnEnvironment), same)


def get_environment(name: str, /, *, environments_path: Sequence[str | Path] = (), **kwargs: Any) -> Environment:
    """Make an environment. Its dataset is loaded when it is first asked for.

    `kwargs` go to the constructor, to `load_dataset`, or to both, as each declares them; unknown ones raise
    `UserError` with the list of the known.
    """
    return make_environment(environment_class(name, environments_path), name, kwargs)


def make_environment(cls: type[Environment], name: str, kwargs: dict[str, Any]) -> Environment:
    """An instance of `cls` that goes by `name`. Raises `UserError` for unknown keyword arguments."""
    check_arguments(cls, kwargs, Environment, called=f"The environment {name!r}")
    environment: Environment = instantiate(cls, Environment, name, kwargs)
    return environment
