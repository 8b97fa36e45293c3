"""FSDP2: parameters, gradients and optimizer state sharded over all ranks."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "FSDPBackend":  # imported when it is used: it needs torch
        from telescope.trainer.backends.fsdp.backend import FSDPBackend

        return FSDPBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
