"""Provides the Megatron backend: tensor, pipeline, context and expert parallelism by megatron-core."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from telescope.errors import ConfigError
from telescope.utils.packages import is_installed

if TYPE_CHECKING:
    from telescope.trainer.backends import TrainingBackend


def load_backend() -> type[TrainingBackend]:
    """Returns the backend's class. Raises `ConfigError` without megatron-core.

    Only for the process of a trainer rank: without a GPU it changes `torch.cuda`, before megatron-core is imported.
    """
    if not is_installed("megatron.core"):
        raise ConfigError("train_backend: 'megatron' needs megatron-core: install it with make setup MEGATRON=1")
    # It warns about options that this backend sets on purpose, and about its own deprecated calls.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if not torch.cuda.is_available():
        from telescope.trainer.backends.megatron.cpu import place_on_cpu

        place_on_cpu()
    from telescope.trainer.backends.megatron.backend import MegatronBackend

    return MegatronBackend
