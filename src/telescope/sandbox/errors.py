"""Errors of sandboxes: infrastructure failures, which are retried or masked, and incomplete set-ups."""

from __future__ import annotations

from typing import Any

from telescope.errors import InfrastructureError, UserError


class SandboxError(InfrastructureError):
    """A sandbox or its provider failed."""


class SandboxCommandTimeoutError(SandboxError):
    """A command exceeded its time limit. All of its processes were killed."""

    def __init__(self, command: str, timeout: float, sandbox_id: str = "") -> None:
        self.command, self.timeout, self.sandbox_id = command, timeout, sandbox_id
        shown = command if len(command) <= 200 else command[:200] + "..."
        super().__init__(f"the command {shown!r} did not end within {timeout:g} s in sandbox {sandbox_id!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.command, self.timeout, self.sandbox_id)


class SandboxOOMError(SandboxError):
    """A sandbox ran out of memory and ended."""


class SandboxNotRunningError(SandboxError):
    """A sandbox has ended, or never existed."""


class SandboxImagePullError(SandboxError):
    """The image of a sandbox cannot be pulled or built."""


class SandboxBusyError(SandboxError):
    """A service temporarily refuses to create a sandbox. Nothing was left behind; retry after a pause."""


class SandboxSetupError(UserError):
    """A provider cannot be used. The message names what is missing and how to get it."""
