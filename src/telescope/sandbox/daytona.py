"""Sandboxes of Daytona, by the package `daytona`, or `daytona-sdk` of older installations."""

from __future__ import annotations

import asyncio
import math
import shlex
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

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
from telescope.sandbox.remote import LABEL, RemoteSandboxProvider, has_credentials, minutes, run_label

CREATE_SECONDS = 600
"""Time for a creation, with the first build of an image."""


class DaytonaSandboxProvider(RemoteSandboxProvider):
    """Runs sandboxes at Daytona. `extra["snapshot"]` starts one from a snapshot, whose sizes count."""

    setup_hint = (
        "Set DAYTONA_API_KEY (https://app.daytona.io/dashboard/keys), or DAYTONA_JWT_TOKEN and "
        "DAYTONA_ORGANIZATION_ID; quotas: https://app.daytona.io/dashboard/limits"
    )
    errors = (
        ("DaytonaFileNotFoundError", "", SandboxError),
        ("DaytonaProcessExecutionTimeoutError", "", SandboxCommandTimeoutError),
        ("DaytonaQueueTimeoutError", "", SandboxNotRunningError),
        ("DaytonaNotFoundError", "", SandboxNotRunningError),
        ("DaytonaGoneError", "", SandboxNotRunningError),
        ("DaytonaSpotEvictedError", "", SandboxNotRunningError),
        ("DaytonaAuthenticationError", "", SandboxSetupError),
        ("DaytonaForbiddenError", "", SandboxSetupError),
        ("DaytonaRateLimitError", "", SandboxBusyError),
        ("DaytonaBadGatewayError", "", SandboxBusyError),
        ("DaytonaServiceUnavailableError", "", SandboxBusyError),
        ("DaytonaTimeoutError", "", SandboxCommandTimeoutError),
        ("DaytonaConnectionError", "", SandboxBusyError),
        ("DaytonaError", "(?i)image|build|pull|manifest", SandboxImagePullError),
        ("DaytonaError", "(?i)is not running|is not started|state.*(stopped|destroyed)", SandboxNotRunningError),
    )

    def __init__(self, api_key: str | None = None) -> None:
        super().__init__()
        module = "daytona_sdk" if find_spec("daytona_sdk") and not find_spec("daytona") else "daytona"
        self.sdk = load_sdk(module, "daytona", self.name)
        if not api_key and not has_credentials("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN"):
            raise SandboxSetupError(f"The sandbox provider 'daytona' has no key. {self.setup_hint}")
        self.api_key = api_key
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    @property
    def client(self) -> Any:
        loop = asyncio.get_running_loop()  # connections belong to a loop
        if loop not in self._clients:
            settings = self.sdk.DaytonaConfig(api_key=self.api_key) if self.api_key else None
            self._clients[loop] = self.sdk.AsyncDaytona(settings)
        return self._clients[loop]

    async def _sandbox(self, handle: SandboxHandle) -> Any:
        if handle.provider_data is None:
            handle.provider_data = await self.client.get(handle.id)
        return handle.provider_data

    async def _start(self, config: SandboxConfig) -> SandboxHandle:
        life, snapshot = minutes(config.timeout_seconds), config.extra.get("snapshot")
        kind = self.sdk.CreateSandboxFromSnapshotParams if snapshot else self.sdk.CreateSandboxFromImageParams
        settings: dict[str, Any] = {
            "env_vars": dict(config.environment_vars),
            "labels": run_label(config),
            "network_block_all": not config.extra.get("network"),
            "auto_stop_interval": life,
            "ephemeral": True,
        }
        if "ttl_minutes" in kind.model_fields:  # older versions know the idle time alone
            settings["ttl_minutes"] = life
        if snapshot:
            settings["snapshot"] = snapshot
        else:
            memory, disk = math.ceil(config.memory_mb / 1024), math.ceil(config.disk_size_gb)
            resources = {"cpu": math.ceil(config.cpu), "memory": memory, "disk": disk, "gpu": config.gpu_count or None}
            settings |= {"image": config.image, "resources": self.sdk.Resources(**resources)}
        sandbox = await self.client.create(kind(**settings), timeout=CREATE_SECONDS)
        return SandboxHandle(sandbox.id, sandbox)

    async def _run(self, handle: SandboxHandle, script: str, timeout: int) -> ExecResult:
        sandbox = await self._sandbox(handle)
        result = await sandbox.process.exec(f"sh -c {shlex.quote(script)}", timeout=timeout)
        return ExecResult(int(result.exit_code), result.result or "", "")

    async def _upload(self, handle: SandboxHandle, path: str, content: bytes) -> None:
        await (await self._sandbox(handle)).fs.upload_file(content, path)

    async def _destroy(self, handle: SandboxHandle) -> None:
        await (await self.client.get(handle.id)).delete()  # of this loop's client

    async def find(self, run: str) -> list[SandboxHandle]:
        with self._translated("", "list", 60):
            query = self.sdk.ListSandboxesQuery(labels={LABEL: run})
            return [SandboxHandle(sandbox.id, sandbox) async for sandbox in self.client.list(query)]

    async def close(self) -> None:
        if client := self._clients.pop(asyncio.get_running_loop(), None):
            await client.close()
