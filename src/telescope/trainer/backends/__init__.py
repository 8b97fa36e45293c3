"""Training backends: the interface, and the lookup of the class in a config."""

from __future__ import annotations

import importlib
import inspect

from telescope.errors import ConfigError
from telescope.trainer.backends.base import TrainingBackend
from telescope.weights.plan import TensorMeta

__all__ = ["TensorMeta", "TrainingBackend", "find_backend"]


def find_backend(name: str) -> type[TrainingBackend]:
    """Returns the class of `train_backend`: a built-in name or `package.module:Class`.

    A subclass of `TrainingBackend` with abstract methods inherits them, and its `super()`, from the FSDP backend.
    Raises `ConfigError` if there is no such class, or if it is not a backend.
    """
    if name == "fsdp":
        from telescope.trainer.backends.fsdp.backend import FSDPBackend

        return FSDPBackend
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise ConfigError(f"train_backend: {name!r} is unknown: use 'fsdp' or 'package.module:Class'")
    found = _imported(name, module_name, class_name)
    if not (isinstance(found, type) and issubclass(found, TrainingBackend)):
        raise ConfigError(f"train_backend: {name!r} is not a subclass of telescope.trainer.backends.TrainingBackend")
    return _completed(found) if inspect.isabstract(found) else found


def _imported(name: str, module_name: str, class_name: str) -> object:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # The user's module may raise anything while it is imported.
        raise ConfigError(f"train_backend: {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, class_name):
        raise ConfigError(f"train_backend: {name!r} cannot be imported: {module.__file__} has no {class_name}")
    return getattr(module, class_name)


def _completed(partial: type[TrainingBackend]) -> type[TrainingBackend]:
    from telescope.trainer.backends.fsdp.backend import FSDPBackend

    completed = type(partial.__name__, (partial, FSDPBackend), {"__doc__": partial.__doc__})
    assert issubclass(completed, TrainingBackend)
    return completed
