"""A fake of the package `prime-sandboxes`: what Telescope calls of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.fakes.sandbox_sdks.machine import MACHINE, Box, add_errors


class APIError(Exception): ...


class SandboxNotRunningError(RuntimeError): ...


add_errors(globals(), APIError, "UnauthorizedError", "PaymentRequiredError", "APITimeoutError")
add_errors(globals(), SandboxNotRunningError, "SandboxOOMError", "SandboxTimeoutError", "SandboxImagePullError")
add_errors(globals(), RuntimeError, "CommandTimeoutError", "UploadTimeoutError", "DownloadTimeoutError")


@dataclass
class StartCommand:
    executable: str
    args: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class CreateSandboxRequest:
    name: str
    docker_image: str | None = None
    start_command: StartCommand | None = None
    cpu_cores: float = 1.0
    memory_gb: float = 1.0
    disk_size_gb: float | None = None
    gpu_count: int = 0
    gpu_type: str | None = None
    network_allowlist: list[str] | None = None
    timeout_minutes: int = 60
    environment_vars: dict[str, str] | None = None
    labels: list[str] = field(default_factory=list)
    team_id: str | None = None
    idempotency_key: str | None = None


class AsyncSandboxClient:
    def __init__(self, api_key: str | None = None) -> None:
        self.api_key = api_key

    async def create(self, request: CreateSandboxRequest) -> Any:
        labels = dict(label.split("=", 1) for label in request.labels)
        network = request.network_allowlist is None
        return await MACHINE.create(Box(vars(request), labels, network, request.environment_vars or {}))

    async def wait_for_creation(self, sandbox_id: str) -> None:
        await MACHINE.step("wait")

    async def execute_command(self, sandbox_id: str, command: str, timeout: int | None = None) -> Any:
        await MACHINE.step("execute")
        if sandbox_id not in MACHINE.boxes:
            raise SandboxNotRunningError(sandbox_id)
        code, output, errors = await MACHINE.boxes[sandbox_id].run("sh", "-c", command)
        return SimpleNamespace(exit_code=code, stdout=output.decode(), stderr=errors.decode())

    async def start_background_job(self, sandbox_id: str, command: str, working_dir: str | None = None) -> Any:
        return SimpleNamespace(job_id=sandbox_id, command=command, working_dir=working_dir)

    async def get_background_job(self, sandbox_id: str, job: Any) -> Any:
        result = await self.execute_command(sandbox_id, job.command)
        return SimpleNamespace(completed=True, **vars(result))

    async def upload_bytes(self, sandbox_id: str, file_path: str, file_bytes: bytes, filename: str) -> None:
        await MACHINE.step("upload")
        MACHINE.boxes[sandbox_id].write(file_path, file_bytes, parents=False)

    async def list(self, labels: list[str] | None = None, page: int = 1, exclude_terminated: bool | None = None) -> Any:
        found = list(MACHINE.labelled(dict(label.split("=", 1) for label in labels or [])))
        return SimpleNamespace(sandboxes=found[page - 1 : page], has_next=page < len(found))  # one a page

    async def delete(self, sandbox_id: str) -> None:
        await MACHINE.step("destroy")
        if not MACHINE.remove(sandbox_id):
            raise APIError("HTTP 404: no such sandbox")

    async def aclose(self) -> None: ...
