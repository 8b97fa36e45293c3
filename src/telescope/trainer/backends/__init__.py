"""Training backends: the interface, and finding the one that a config names."""

from __future__ import annotations

import importlib

from telescope.errors import ConfigError
from telescope.trainer.backends.base import TensorMeta, TrainingBackend

__all__ = ["TensorMeta", "TrainingBackend", "find_backend"]


def find_backend(name: str) -> type[TrainingBackend]:
    """The class behind `train_backend`: a built-in name or `package.module:Class`.

    Raises `ConfigError` when there is none, or when what is there is not a backend.
    """
    if name == "fsdp":
        from telescope.trainer.backends.fsdp.backend import FSDPBackend

        return FSDPBackend
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise ConfigError(f"train_backend: {name!r} is not available: use 'fsdp' or 'package.module:Class'")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"train_backend: {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, TrainingBackend)):
        raise ConfigError(f"train_backend: {name!r} is not a subclass of telescope.trainer.backends.TrainingBackend")
    return found
