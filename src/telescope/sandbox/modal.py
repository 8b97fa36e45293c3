"""Runs sandboxes at Modal with the package `modal`."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from telescope.sandbox import errors
from telescope.sandbox.base import ExecResult, SandboxConfig, SandboxHandle
from telescope.sandbox.remote import LABEL, CloudSandboxProvider, run_label


class ModalSandboxProvider(CloudSandboxProvider):
    """Runs sandboxes at Modal in the app `extra["app"]`. The default image is Debian with this Python."""

    extra_options = ("app", "region", "gpu_type")
    modules, package = ("modal",), "modal"
    key_variables, key_file = ("MODAL_TOKEN_ID",), "~/.modal.toml"
    setup_hint = "Set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET (https://modal.com/settings/tokens), or run: modal setup"
    default_image = ""
    detach_after = 3600
    makes_folders = True
    error_table = (
        ("(SandboxTimeout|SandboxTerminated|NotFound)Error|ClientClosed", "", errors.SandboxNotRunningError),
        ("ExecTimeoutError", "", errors.SandboxCommandTimeoutError),
        ("ImageBuildError", "", errors.SandboxImagePullError),
        ("(Auth|PermissionDenied)Error", "", errors.SandboxSetupError),
        ("(ResourceExhausted|Service|Connection)Error|InternalFailure", "", errors.SandboxBusyError),
    )

    def __init__(self) -> None:
        super().__init__()  # tokens come in pairs, from the environment or a file

    async def _attach(self, sandbox_id: str) -> Any:
        return await self.sdk.Sandbox.from_id.aio(sandbox_id)

    async def _start(self, config: SandboxConfig) -> SandboxHandle:
        extra, images = config.extra, self.sdk.Image
        gpu = f"{extra.get('gpu_type', 'any')}:{config.gpu_count}" if config.gpu_count else None
        sandbox = await self.sdk.Sandbox.create.aio(
            "sleep",
            "infinity",
            app=await self.sdk.App.lookup.aio(extra.get("app", "telescope"), create_if_missing=True),
            image=images.from_registry(config.image) if config.image else images.debian_slim(),
            cpu=config.cpu,
            memory=config.memory_mb,
            gpu=gpu,
            timeout=math.ceil(config.timeout_seconds),
            env=dict(config.environment_vars),
            block_network=not extra.get("network"),
            region=extra.get("region"),
            tags=run_label(config),
        )
        return SandboxHandle(sandbox.object_id, sandbox)

    async def _run(self, handle: SandboxHandle, script: str, timeout: int) -> ExecResult:
        sandbox = await self._sandbox(handle)
        process = await sandbox.exec.aio("sh", "-c", script, timeout=timeout, text=False)
        streams = await asyncio.gather(process.stdout.read.aio(), process.stderr.read.aio())
        code = await process.wait.aio()  # -1: the service's deadline, which is later than the script's
        if code not in (0, 137) and await sandbox.poll.aio() is not None:
            raise errors.SandboxNotRunningError(f"sandbox {handle.id!r} of modal has ended")
        return ExecResult(code, *(stream.decode(errors="replace") for stream in streams))

    async def _upload(self, handle: SandboxHandle, path: str, content: bytes) -> None:
        await (await self._sandbox(handle)).filesystem.write_bytes.aio(content, path)

    async def _destroy(self, handle: SandboxHandle) -> None:
        sandbox = await self._sandbox(handle)
        await sandbox.terminate.aio()
        await sandbox.detach.aio()

    async def _find(self, run: str) -> list[SandboxHandle]:
        return [SandboxHandle(box.object_id, box) async for box in self.sdk.Sandbox.list.aio(tags={LABEL: run})]
