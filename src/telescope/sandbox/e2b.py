"""Sandboxes of E2B, by the package `e2b`."""

from __future__ import annotations

import math
from typing import Any

from telescope.sandbox.base import (
    ExecResult,
    SandboxBusyError,
    SandboxCommandTimeoutError,
    SandboxConfig,
    SandboxError,
    SandboxHandle,
    SandboxImagePullError,
    SandboxNotRunningError,
    SandboxSetupError,
)
from telescope.sandbox.registry import load_sdk
from telescope.sandbox.remote import LABEL, RemoteSandboxProvider, has_credentials, run_label, unique_name


class E2BSandboxProvider(RemoteSandboxProvider):
    """Runs sandboxes at E2B. The image is a template, to which processors, memory and disk belong."""

    setup_hint = "Set E2B_API_KEY: https://e2b.dev/dashboard?tab=keys"
    creates_per_second = 1.0
    default_image = None
    detach_after = 60
    makes_folders = True
    errors = (
        # The first two are timeouts by inheritance, but say that the sandbox is gone, or perhaps gone.
        ("SandboxNotRunningException", "", SandboxNotRunningError),
        ("SandboxUnreachableException", "", SandboxError),
        ("SandboxNotFoundException", "", SandboxNotRunningError),
        ("TimeoutException", "", SandboxCommandTimeoutError),
        ("BuildException", "", SandboxImagePullError),
        ("TemplateException", "", SandboxImagePullError),
        ("RateLimitException", "", SandboxBusyError),
        ("ServiceBusyException", "", SandboxBusyError),
        ("ConnectError", "", SandboxBusyError),
        ("AuthenticationException", "", SandboxSetupError),
    )

    def __init__(self, api_key: str | None = None) -> None:
        super().__init__()
        self.sdk = load_sdk("e2b", "e2b", self.name)
        if not api_key and not has_credentials("E2B_API_KEY"):
            raise SandboxSetupError(f"The sandbox provider 'e2b' has no key. {self.setup_hint}")
        self.options = {"api_key": api_key} if api_key else {}

    async def _sandbox(self, handle: SandboxHandle) -> Any:
        if handle.provider_data is None:
            handle.provider_data = await self.sdk.AsyncSandbox.connect(handle.id, **self.options)
        return handle.provider_data

    async def _start(self, config: SandboxConfig) -> SandboxHandle:
        sandbox = await self.sdk.AsyncSandbox.create(
            template=config.image or None,
            timeout=math.ceil(config.timeout_seconds),
            metadata=run_label(config),
            envs=dict(config.environment_vars),
            allow_internet_access=bool(config.extra.get("network")),
            lifecycle={"on_timeout": "kill"},
            idempotency_key=unique_name(SandboxConfig()),
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
            raise SandboxNotRunningError(f"sandbox {handle.id!r} of e2b has ended") from error
        return ExecResult(result.exit_code, result.stdout, result.stderr)

    async def _upload(self, handle: SandboxHandle, path: str, content: bytes) -> None:
        await (await self._sandbox(handle)).files.write(path, content)

    async def _destroy(self, handle: SandboxHandle) -> None:
        await self.sdk.AsyncSandbox.kill(handle.id, **self.options)

    async def find(self, run: str) -> list[SandboxHandle]:
        with self._translated("", "list", 60):
            pages = self.sdk.AsyncSandbox.list(query=self.sdk.SandboxQuery(metadata={LABEL: run}), **self.options)
            found: list[SandboxHandle] = []
            while pages.has_next:
                found += [SandboxHandle(info.sandbox_id) for info in await pages.next_items()]
            return found
