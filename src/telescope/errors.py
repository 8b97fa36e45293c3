"""Errors that several packages raise.

`UserError` is for what a user can fix: its message names the field or argument, the value, and the fix, and the
command line prints it without a traceback and exits with code 2. Everything else that escapes is a bug or a failing
machine, and keeps its traceback.
"""

import re

EXIT_INTERRUPTED = 130
"""Exit code of a command that Ctrl+C ended."""


class UserError(Exception):
    """Bad input from a person. The message is the whole explanation; nothing has been started."""


class ConfigError(UserError):
    """A configuration that cannot be run as written. The message may hold several problems, a line each."""

    @property
    def problems(self) -> list[str]:
        """The problems. Indented lines belong to the one before."""
        return re.split(r"\n(?! )", str(self))


class UnreachableError(UserError):
    """A dataset, a judge or a sandbox that this machine does not reach, and another machine may."""


class RunError(RuntimeError):
    """A run cannot continue, and the user can fix the reason. The message explains it."""


class RankLost(RunError):
    """The process of a trainer rank is gone. The message names the rank, how it ended, and the end of its log."""


class DeadlineExceeded(RuntimeError):
    """A deadline has passed. The message names the wait, its length, and the last report of the other side."""


class InfrastructureError(RuntimeError):
    """An engine, a sandbox or the network failed. Retried, then masked; never scored as a reward of 0."""


class MalformedResultError(TypeError):
    """User code returned a value that its interface does not allow. The message names the field and the value."""


class EnvironmentFailure(RuntimeError):
    """An environment's own code raised, hung, or returned a malformed value. The sample is masked and counted."""
