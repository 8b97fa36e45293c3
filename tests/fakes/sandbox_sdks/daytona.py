"""A fake of the package `daytona`: what Telescope calls of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from tests.fakes.sandbox_sdks.machine import MACHINE, Box, add_errors


class DaytonaError(Exception): ...


class DaytonaNotFoundError(DaytonaError): ...


class DaytonaTimeoutError(DaytonaError):
    sandbox_id: str | None = None


add_errors(
    globals(), DaytonaError,
    "DaytonaGoneError", "DaytonaSpotEvictedError", "DaytonaAuthenticationError", "DaytonaForbiddenError",
    "DaytonaRateLimitError", "DaytonaBadGatewayError", "DaytonaServiceUnavailableError",
)  # fmt: skip
add_errors(globals(), DaytonaNotFoundError, "DaytonaFileNotFoundError")
add_errors(globals(), DaytonaForbiddenError, "DaytonaFileAccessDeniedError")  # type: ignore[name-defined]  # noqa: F821
add_errors(globals(), DaytonaTimeoutError, "DaytonaQueueTimeoutError", "DaytonaProcessExecutionTimeoutError")


class DaytonaConnectionError(DaytonaError): ...


class DaytonaConnectionTimeoutError(DaytonaConnectionError, DaytonaTimeoutError): ...


@dataclass
class DaytonaConfig:
    api_key: str | None = None


@dataclass
class Resources:
    cpu: int | None = None
    memory: int | None = None
    disk: int | None = None
    gpu: int | None = None


@dataclass
class ListSandboxesQuery:
    labels: dict[str, str] | None = None


@dataclass(kw_only=True)
class CreateSandboxParams:
    model_fields: ClassVar = {"ttl_minutes"}
    env_vars: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    auto_stop_interval: int | None = None
    ttl_minutes: int | None = None
    network_block_all: bool | None = None
    ephemeral: bool | None = None


@dataclass(kw_only=True)
class CreateSandboxFromImageParams(CreateSandboxParams):
    image: str
    resources: Resources | None = None


@dataclass(kw_only=True)
class CreateSandboxFromSnapshotParams(CreateSandboxParams):
    snapshot: str | None = None


class AsyncProcess:
    def __init__(self, box: Box) -> None:
        self.box = box

    async def exec(self, command: str, timeout: int | None = None) -> Any:
        await MACHINE.step("execute")
        if self.box.id not in MACHINE.boxes:
            raise DaytonaNotFoundError(self.box.id)
        code, output, errors = await self.box.run("sh", "-c", command)
        return SimpleNamespace(exit_code=code, result=(output + errors).decode())


class AsyncFileSystem:
    def __init__(self, box: Box) -> None:
        self.box = box

    async def upload_file(self, src: bytes, dst: str) -> None:
        await MACHINE.step("upload")
        self.box.write(dst, src, parents=False)


class AsyncSandbox:
    def __init__(self, box: Box) -> None:
        self.id, self.process, self.fs = box.id, AsyncProcess(box), AsyncFileSystem(box)

    async def delete(self) -> None:
        await MACHINE.step("destroy")
        MACHINE.remove(self.id)


class AsyncDaytona:
    def __init__(self, config: DaytonaConfig | None = None) -> None:
        self.config = config

    async def create(self, params: Any = None, *, timeout: float = 60) -> AsyncSandbox:
        settings = vars(params)
        box = Box(settings, params.labels or {}, not params.network_block_all, params.env_vars or {})
        return AsyncSandbox(await MACHINE.create(box))

    async def get(self, sandbox_id_or_name: str) -> AsyncSandbox:
        if sandbox_id_or_name not in MACHINE.boxes:
            raise DaytonaNotFoundError(sandbox_id_or_name)
        return AsyncSandbox(MACHINE.boxes[sandbox_id_or_name])

    async def list(self, query: ListSandboxesQuery | None = None) -> AsyncIterator[AsyncSandbox]:
        for box in MACHINE.labelled((query and query.labels) or {}):
            yield AsyncSandbox(box)

    async def close(self) -> None: ...
