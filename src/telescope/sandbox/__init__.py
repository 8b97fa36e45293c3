"""Sandboxes: one interface over local isolation, containers and cloud services (docs/sandboxes.md)."""

from telescope.sandbox.base import ExecResult, SandboxConfig, SandboxHandle, SandboxProvider
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
from telescope.sandbox.registry import get_provider

__all__ = [
    "ExecResult",
    "GenericSandboxPool",
    "SandboxBusyError",
    "SandboxCommandTimeoutError",
    "SandboxConfig",
    "SandboxError",
    "SandboxHandle",
    "SandboxImagePullError",
    "SandboxNotRunningError",
    "SandboxOOMError",
    "SandboxProvider",
    "SandboxSetupError",
    "get_provider",
]
