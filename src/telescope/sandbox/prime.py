"""Runs sandboxes at Prime Intellect with the package `prime-sandboxes`."""

from __future__ import annotations

import math
from typing import Any

from telescope.sandbox import errors
from telescope.sandbox.base import ExecResult, SandboxConfig, SandboxHandle
from telescope.sandbox.remote import LABEL, CloudSandboxProvider, run_label, unique_name


class PrimeSandboxProvider(CloudSandboxProvider):
    """Runs sandboxes at Prime Intellect. The first use of an image builds it, for up to 50 minutes."""

    extra_options = ("team_id", "start_command", "gpu_type")
    modules, package = ("prime_sandboxes",), "prime-sandboxes"
    key_variables, key_file = ("PRIME_API_KEY",), "~/.prime/config.json"
    setup_hint = "Set PRIME_API_KEY (https://app.primeintellect.ai/dashboard/tokens), or run: prime login"
    error_table = (
        ("CommandTimeoutError", "", errors.SandboxCommandTimeoutError),
        ("SandboxOOMError", "", errors.SandboxOOMError),
        ("SandboxImagePullError", "", errors.SandboxImagePullError),
        ("SandboxNotRunningError", "", errors.SandboxNotRunningError),
        ("(Unauthorized|PaymentRequired)Error", "", errors.SandboxSetupError),
        ("APITimeoutError", "", errors.SandboxBusyError),
        ("APIError", "HTTP (409|429|5..)|ConnectError", errors.SandboxBusyError),
        ("APIError", "HTTP (404|410)", errors.SandboxNotRunningError),
    )

    def _connect(self) -> Any:
        return self.sdk.AsyncSandboxClient(api_key=self.api_key)

    async def _start(self, config: SandboxConfig) -> SandboxHandle:
        name, extra = unique_name(config), config.extra
        command = extra.get("start_command")
        if isinstance(command, str) and hasattr(self.sdk, "StartCommand"):
            command = self.sdk.StartCommand(executable="sh", args=["-c", command])
        request = self.sdk.CreateSandboxRequest(
            name=name,
            docker_image=config.image,
            start_command=command,
            cpu_cores=config.cpu,
            memory_gb=config.memory_mb / 1024,
            disk_size_gb=config.disk_size_gb,
            gpu_count=config.gpu_count,
            gpu_type=extra.get("gpu_type"),
            timeout_minutes=math.ceil(config.timeout_seconds / 60),
            environment_vars=config.environment_vars,
            labels=[f"{key}={value}" for key, value in run_label(config).items()],
            team_id=extra.get("team_id"),
            network_allowlist=None if extra.get("network") else [],  # [] denies all
            idempotency_key=name,
        )
        try:
            sandbox = await self.client.create(request)
        except self.sdk.APITimeoutError:  # it may exist: the same key returns the same sandbox
            sandbox = await self.client.create(request)
        return SandboxHandle(sandbox.id)

    async def _wait_until_running(self, handle: SandboxHandle) -> None:
        await self.client.wait_for_creation(handle.id)

    async def _run(self, handle: SandboxHandle, script: str, timeout: int) -> ExecResult:
        result = await self.client.execute_command(handle.id, script, timeout=timeout)
        return ExecResult(result.exit_code, result.stdout, result.stderr)

    async def start_background_job(self, handle: SandboxHandle, command: str, working_dir: str | None = None) -> Any:
        """Starts a command that may run for hours. Returns the SDK's `BackgroundJob`."""
        with self._translated("start of a background job", handle.id):
            return await self.client.start_background_job(handle.id, command, working_dir=working_dir)

    async def get_background_job(self, handle: SandboxHandle, job: Any) -> Any:
        """Returns the SDK's job status: `completed`, `exit_code`, `stdout`, `stderr`."""
        with self._translated("a background job", handle.id):
            return await self.client.get_background_job(handle.id, job)

    async def _upload(self, handle: SandboxHandle, path: str, content: bytes) -> None:
        await self.client.upload_bytes(handle.id, path, content, path.rpartition("/")[2])

    async def _destroy(self, handle: SandboxHandle) -> None:
        await self.client.delete(handle.id)

    async def _find(self, run: str) -> list[SandboxHandle]:
        found: list[SandboxHandle] = []
        for page in range(1, 1000):
            answer = await self.client.list(labels=[f"{LABEL}={run}"], page=page, exclude_terminated=True)
            found += [SandboxHandle(sandbox.id) for sandbox in answer.sandboxes]
            if not answer.has_next:
                break
        return found
