"""A rollout's own sandbox: its commands, its files, and the agents' endpoint as it is called from inside."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from telescope.errors import UserError
from telescope.sandbox.base import ENDPOINT_PORT, ExecResult, SandboxHandle
from telescope.sandbox.errors import SandboxSetupError
from telescope.sandbox.pool import GenericSandboxPool

ENDPOINT_INSIDE = f"http://127.0.0.1:{ENDPOINT_PORT}"
"""URL of the endpoint inside a local sandbox."""


class Sandbox:
    """A sandbox from a pool. `endpoint` is the URL of the agents' endpoint on the host."""

    def __init__(self, pool: GenericSandboxPool, handle: SandboxHandle, *, endpoint: str = "") -> None:
        self.pool, self.handle = pool, handle
        self._endpoint = endpoint.removesuffix("/v1")

    async def run(
        self, command: str, *, env: Mapping[str, str] | None = None, timeout: float = 60, cwd: str | None = None
    ) -> ExecResult:
        """Runs a shell command with the variables in `env`.

        Endpoint URLs in them are replaced by the URL inside the sandbox. Raises `SandboxCommandTimeoutError` after
        `timeout` seconds.
        """
        if not isinstance(command, str):
            raise UserError(f"run got {command!r:.80}: give the text of a shell command (shlex.join)")
        variables = {name: self._inside(str(value)) for name, value in (env or {}).items()}
        exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in variables.items())
        return await self.pool.provider.execute(self.handle, exports + command, timeout=timeout, working_dir=cwd)

    async def write(self, path: str, content: str | bytes) -> None:
        """Writes a file and creates its parent folders."""
        data = content.encode() if isinstance(content, str) else content
        await self.pool.provider.upload_bytes(self.handle, path, data)

    async def read(self, path: str) -> bytes:
        """Returns the content of a file. Raises `SandboxError` if it is missing."""
        return await self.pool.provider.read_bytes(self.handle, path)

    async def close(self) -> None:
        """Destroys the sandbox."""
        await self.pool.remove(self.handle)

    def _inside(self, value: str) -> str:
        if not self._endpoint or not value.startswith(self._endpoint):
            return value
        if "endpoint" not in self.pool.config.extra:
            raise SandboxSetupError(
                f"a sandbox of {self.pool.name!r} cannot reach the endpoint of a rollout: run the agent in the rollout "
                "worker, or in a `local` sandbox"
            )
        return ENDPOINT_INSIDE + value.removeprefix(self._endpoint)
