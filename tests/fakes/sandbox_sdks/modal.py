"""A fake of the package `modal`: what Telescope calls of it. Methods have the form `.aio` alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.fakes.sandbox_sdks.machine import MACHINE, Box, add_errors


class Error(Exception): ...


class NotFoundError(Error): ...


class SandboxTerminatedError(Error): ...


add_errors(
    globals(), Error,
    "AuthError", "PermissionDeniedError", "ResourceExhaustedError", "ServiceError", "InternalFailure", "RemoteError",
    "ConnectionError", "ClientClosed", "TimeoutError",
)  # fmt: skip
add_errors(globals(), globals()["RemoteError"], "ImageBuildError")
add_errors(globals(), globals()["TimeoutError"], "SandboxTimeoutError", "ExecTimeoutError")


class AIO:
    """A method that is called as `x.method.aio(...)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, instance: object, owner: type) -> Any:
        bound = self.function.__get__(owner if instance is None else instance)
        return SimpleNamespace(aio=bound)


class App:
    @AIO
    async def lookup(self, name: str, *, create_if_missing: bool = False) -> str:
        return name


class Image:
    @staticmethod
    def from_registry(tag: str) -> str:
        return tag

    @staticmethod
    def debian_slim() -> str:
        return "debian"


class Process:
    def __init__(self, code: int, output: bytes, errors: bytes) -> None:
        self.code = code
        self.stdout, self.stderr = (SimpleNamespace(read=SimpleNamespace(aio=_answer(x))) for x in (output, errors))

    @AIO
    async def wait(self) -> int:
        return self.code


def _answer(value: bytes) -> Callable[[], Any]:
    async def read() -> bytes:
        return value

    return read


class Filesystem:
    def __init__(self, box: Box) -> None:
        self.box = box

    @AIO
    async def write_bytes(self, data: bytes, remote_path: str) -> None:
        await MACHINE.step("upload")
        self.box.write(remote_path, data, parents=True)


class Sandbox:
    def __init__(self, box: Box) -> None:
        self.box, self.object_id, self.filesystem = box, box.id, Filesystem(box)

    @AIO
    async def create(
        self,
        *args: str,
        app: Any = None,
        tags: dict[str, str] | None = None,
        image: Any = None,
        env: dict[str, str] | None = None,
        timeout: int | None = 300,
        gpu: str | None = None,
        region: str | None = None,
        cpu: float | None = None,
        memory: int | None = None,
        block_network: bool = False,
    ) -> Sandbox:
        settings = {"app": app, "image": image, "cpu": cpu, "memory": memory, "gpu": gpu, "timeout": timeout}
        return Sandbox(await MACHINE.create(Box(settings, tags or {}, not block_network, env or {})))

    @AIO
    async def from_id(self, sandbox_id: str) -> Sandbox:
        if sandbox_id not in MACHINE.boxes:
            raise NotFoundError(sandbox_id)
        return Sandbox(MACHINE.boxes[sandbox_id])

    @AIO
    async def list(self, *, tags: dict[str, str] | None = None) -> Any:
        for box in MACHINE.labelled(tags or {}):
            yield Sandbox(box)

    @AIO
    async def exec(self, *args: str, timeout: int | None = None, text: bool = True) -> Process:
        await MACHINE.step("execute")
        assert sum(map(len, args)) < 65_536, "the service takes no longer command line"
        if self.object_id not in MACHINE.boxes:
            raise SandboxTerminatedError(self.object_id)
        return Process(*await self.box.run(*args))

    @AIO
    async def poll(self) -> int | None:
        return None if self.object_id in MACHINE.boxes else 0

    @AIO
    async def terminate(self) -> None:
        await MACHINE.step("destroy")
        MACHINE.remove(self.object_id)

    @AIO
    async def detach(self) -> None: ...
