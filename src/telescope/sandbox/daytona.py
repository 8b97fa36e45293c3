"""Runs sandboxes at Daytona with the package `daytona`, or `daytona-sdk` in older installations."""

from __future__ import annotations

import math
import shlex
from typing import Any

from telescope.sandbox import errors
from telescope.sandbox.base import ExecResult, SandboxConfig, SandboxHandle
from telescope.sandbox.remote import LABEL, CloudSandboxProvider, run_label

CREATE_SECONDS = 600
"""Time for a creation, with the first build of an image."""


class DaytonaSandboxProvider(CloudSandboxProvider):
    """Runs sandboxes at Daytona. `extra["snapshot"]` starts from a snapshot, which sets the sizes."""

    extra_options = ("snapshot",)
    modules, package = ("daytona", "daytona_sdk"), "daytona"
    key_variables = ("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN")
    setup_hint = (
        "Set DAYTONA_API_KEY (https://app.daytona.io/dashboard/keys), or DAYTONA_JWT_TOKEN and "
        "DAYTONA_ORGANIZATION_ID; quotas: https://app.daytona.io/dashboard/limits"
    )
    error_table = (
        # Files inside: these inherit from errors of the account.
        ("DaytonaFile(NotFound|AccessDenied|ReadFailed)Error|DaytonaInvalidFilePathError", "", errors.SandboxError),
        ("DaytonaProcessExecutionTimeoutError", "", errors.SandboxCommandTimeoutError),
        ("Daytona(QueueTimeout|NotFound|Gone|SpotEvicted)Error", "", errors.SandboxNotRunningError),
        ("Daytona(Authentication|Forbidden)Error", "", errors.SandboxSetupError),
        ("Daytona(RateLimit|BadGateway|ServiceUnavailable)Error", "", errors.SandboxBusyError),
        ("DaytonaTimeoutError", "", errors.SandboxError),  # of gateways: the command has its own
        ("DaytonaConnectionError", "", errors.SandboxBusyError),
        ("DaytonaError", "(?i)image|build|pull|manifest", errors.SandboxImagePullError),
        ("DaytonaError", "(?i)is not running|is not started|state.*(stopped|destroyed)", errors.SandboxNotRunningError),
    )

    def _connect(self) -> Any:
        return self.sdk.AsyncDaytona(self.sdk.DaytonaConfig(api_key=self.api_key) if self.api_key else None)

    async def _attach(self, sandbox_id: str) -> Any:
        return await self.client.get(sandbox_id)

    async def _start(self, config: SandboxConfig) -> SandboxHandle:
        life, snapshot = math.ceil(config.timeout_seconds / 60), config.extra.get("snapshot")
        kind = self.sdk.CreateSandboxFromSnapshotParams if snapshot else self.sdk.CreateSandboxFromImageParams
        settings: dict[str, Any] = {
            "env_vars": dict(config.environment_vars),
            "labels": run_label(config),
            "network_block_all": not config.extra.get("network"),
            "auto_stop_interval": life,
            "ephemeral": True,
        }
        if "ttl_minutes" in kind.model_fields:  # older versions limit only the idle time
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
        await (await self.client.get(handle.id)).delete()  # with this loop's client

    async def _find(self, run: str) -> list[SandboxHandle]:
        query = self.sdk.ListSandboxesQuery(labels={LABEL: run})
        return [SandboxHandle(sandbox.id, sandbox) async for sandbox in self.client.list(query)]
