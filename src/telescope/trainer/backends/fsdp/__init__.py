"""Shards parameters, gradients and optimizer state over all ranks with FSDP2."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "FSDPBackend":  # imported when used, because it needs torch
        from telescope.trainer.backends.fsdp.backend import FSDPBackend

        return FSDPBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
