"""A fake of the package `e2b`: what Telescope calls of it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.fakes.sandbox_sdks.machine import MACHINE, Box, add_errors


class SandboxException(Exception): ...


class TimeoutException(SandboxException): ...


class SandboxNotRunningException(TimeoutException): ...


class NotFoundException(SandboxException): ...


class SandboxNotFoundException(NotFoundException): ...


add_errors(globals(), SandboxException, "TemplateException", "RateLimitException")
add_errors(globals(), TimeoutException, "SandboxUnreachableException")
add_errors(globals(), Exception, "AuthenticationException", "ServiceBusyException", "BuildException")


class CommandExitException(SandboxException):
    def __init__(self, stderr: str, stdout: str, exit_code: int, error: str | None) -> None:
        self.stderr, self.stdout, self.exit_code, self.error = stderr, stdout, exit_code, error


@dataclass
class SandboxQuery:
    metadata: dict[str, str] | None = None


class Paginator:
    def __init__(self, found: list[Box]) -> None:
        self.found, self.has_next = found, True

    async def next_items(self) -> list[Any]:  # one a page
        items, self.found = self.found[:1], self.found[1:]
        self.has_next = bool(self.found)
        return [SimpleNamespace(sandbox_id=box.id) for box in items]


class Commands:
    def __init__(self, box: Box) -> None:
        self.box = box

    async def run(self, cmd: str, timeout: float | None = 60) -> Any:
        await MACHINE.step("execute")
        if self.box.id not in MACHINE.boxes:
            raise SandboxNotRunningException(self.box.id)
        code, output, errors = await self.box.run("/bin/bash", "-l", "-c", cmd)
        if code:
            raise CommandExitException(errors.decode(), output.decode(), code, None)
        return SimpleNamespace(exit_code=0, stdout=output.decode(), stderr=errors.decode())


class Filesystem:
    def __init__(self, box: Box) -> None:
        self.box = box

    async def write(self, path: str, data: bytes) -> None:
        await MACHINE.step("upload")
        self.box.write(path, data, parents=True)


class AsyncSandbox:
    def __init__(self, box: Box) -> None:
        self.sandbox_id, self.commands, self.files = box.id, Commands(box), Filesystem(box)

    @classmethod
    async def create(
        cls,
        template: str | None = None,
        timeout: int | None = None,
        metadata: dict[str, str] | None = None,
        envs: dict[str, str] | None = None,
        allow_internet_access: bool | None = None,
        lifecycle: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        **opts: Any,
    ) -> AsyncSandbox:
        settings = {"template": template, "timeout": timeout, "lifecycle": lifecycle, **opts}
        return cls(await MACHINE.create(Box(settings, metadata or {}, bool(allow_internet_access), envs or {})))

    @classmethod
    async def connect(cls, sandbox_id: str, **opts: Any) -> AsyncSandbox:
        if sandbox_id not in MACHINE.boxes:
            raise SandboxNotFoundException(sandbox_id)
        return cls(MACHINE.boxes[sandbox_id])

    @staticmethod
    async def kill(sandbox_id: str, **opts: Any) -> bool:
        await MACHINE.step("destroy")
        return MACHINE.remove(sandbox_id)

    @staticmethod
    def list(query: SandboxQuery | None = None, **opts: Any) -> Paginator:
        return Paginator(list(MACHINE.labelled((query and query.metadata) or {})))

    async def is_running(self) -> bool:
        return self.sandbox_id in MACHINE.boxes
