"""Runs sandboxes at E2B with the package `e2b`."""

from __future__ import annotations

import inspect
import math
from typing import Any

from telescope.sandbox import errors
from telescope.sandbox.base import ExecResult, SandboxConfig, SandboxHandle
from telescope.sandbox.remote import LABEL, CloudSandboxProvider, run_label, unique_name


class E2BSandboxProvider(CloudSandboxProvider):
    """Runs sandboxes at E2B. The image is a template, which sets processors, memory and disk."""

    modules, package, key_variables = ("e2b",), "e2b", ("E2B_API_KEY",)
    setup_hint = "Set E2B_API_KEY: https://e2b.dev/dashboard?tab=keys"
    creates_per_second = 1.0
    default_image = None
    detach_after = 60
    makes_folders = True
    error_table = (
        # The first two inherit from timeouts, but mean that the sandbox is gone, or may be.
        ("Sandbox(NotRunning|NotFound)Exception", "", errors.SandboxNotRunningError),
        ("SandboxUnreachableException", "", errors.SandboxError),
        ("TimeoutException", "cancelled by the server|^Request timed out", errors.SandboxError),
        ("TimeoutException", "", errors.SandboxCommandTimeoutError),
        ("(Build|Template)Exception", "", errors.SandboxImagePullError),
        ("(RateLimit|ServiceBusy)Exception|ConnectError", "", errors.SandboxBusyError),
        ("AuthenticationException", "", errors.SandboxSetupError),
    )

    def __init__(self, api_key: str | None = None) -> None:
        super().__init__(api_key)
        self.options = {"api_key": api_key} if api_key else {}

    async def _attach(self, sandbox_id: str) -> Any:
        return await self.sdk.AsyncSandbox.connect(sandbox_id, **self.options)

    async def _start(self, config: SandboxConfig) -> SandboxHandle:
        create = self.sdk.AsyncSandbox.create
        # Versions that work beside prime-sandboxes (2.56) do not know the key.
        has_key = "idempotency_key" in inspect.signature(create).parameters
        sandbox = await create(
            template=config.image or None,
            timeout=math.ceil(config.timeout_seconds),
            metadata=run_label(config),
            envs=dict(config.environment_vars),
            allow_internet_access=bool(config.extra.get("network")),
            lifecycle={"on_timeout": "kill"},
            **({"idempotency_key": unique_name(SandboxConfig())} if has_key else {}),
            **self.options,
        )
        return SandboxHandle(sandbox.sandbox_id, sandbox)

    async def _run(self, handle: SandboxHandle, script: str, timeout: int) -> ExecResult:
        sandbox = await self._sandbox(handle)
        try:
            result = await sandbox.commands.run(script, timeout=timeout)
        except self.sdk.CommandExitException as error:
            result = error
        except self.sdk.SandboxUnreachableException as error:
            if await sandbox.is_running():
                raise
            raise errors.SandboxNotRunningError(f"sandbox {handle.id!r} of e2b has ended") from error
        return ExecResult(result.exit_code, result.stdout, result.stderr)

    async def _upload(self, handle: SandboxHandle, path: str, content: bytes) -> None:
        await (await self._sandbox(handle)).files.write(path, content)

    async def _destroy(self, handle: SandboxHandle) -> None:
        await self.sdk.AsyncSandbox.kill(handle.id, **self.options)

    async def _find(self, run: str) -> list[SandboxHandle]:
        pages = self.sdk.AsyncSandbox.list(query=self.sdk.SandboxQuery(metadata={LABEL: run}), **self.options)
        found: list[SandboxHandle] = []
        while pages.has_next:
            found += [SandboxHandle(info.sandbox_id) for info in await pages.next_items()]
        return found
