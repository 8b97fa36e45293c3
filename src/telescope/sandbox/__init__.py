"""Sandboxes: one interface over local isolation, containers and cloud services (docs/sandboxes.md)."""

import pkgutil
from typing import Any

from telescope.sandbox.base import PROVIDERS, ExecResult, SandboxConfig, SandboxHandle, SandboxProvider, get_provider
from telescope.sandbox.errors import (
    SandboxBusyError,
    SandboxCommandTimeoutError,
    SandboxError,
    SandboxImagePullError,
    SandboxNotRunningError,
    SandboxOOMError,
    SandboxSetupError,
)
from telescope.sandbox.pool import GenericSandboxPool

__all__ = [
    "ExecResult", "GenericSandboxPool", "SandboxBusyError", "SandboxCommandTimeoutError", "SandboxConfig",
    "SandboxError", "SandboxHandle", "SandboxImagePullError", "SandboxNotRunningError", "SandboxOOMError",
    "SandboxProvider", "SandboxSetupError", "get_provider",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Returns the class of a shipped provider. Imports its module on first use."""
    path = next((path for path in PROVIDERS.values() if path.endswith(f".{name}")), None)
    if path is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pkgutil.resolve_name(path)
