"""The interface of sandbox providers: create, execute, upload, read, destroy.

A provider implements `create`, `execute`, `upload_bytes` and `destroy`; everything else has a default. Calls of a
provider are measured (`sandbox.activity`). A failure is a `SandboxError`, which counts as infrastructure: retried
where that is safe, then masked, never a reward of 0. A missing SDK, key or quota is a `SandboxSetupError`.
"""

from __future__ import annotations

import asyncio
import base64
import math
import pkgutil
import shlex
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from telescope.errors import UserError
from telescope.sandbox.activity import measured
from telescope.sandbox.errors import SandboxError

R = TypeVar("R")

MAX_OUTPUT_BYTES = 2**20
"""Most bytes that a command returns of each stream. The middle of a longer stream is cut out."""

MAX_FILE_BYTES = 64 * 2**20
"""Largest file that is read from a sandbox."""

ENDPOINT_PORT = 8000
"""Port on a local sandbox's loopback for the agents' endpoint."""

ENVIRONMENT_NAMES = {"image": "docker_image", "timeout_seconds": "timeout_minutes"}
"""Fields of a configuration that have another name as arguments of environments."""


@dataclass
class SandboxConfig:
    """Settings of a sandbox. An empty `image` means the provider's default.

    `cpu` counts cores, `timeout_seconds` limits the sandbox's lifetime, and `name` appears in the provider's listings.
    `extra` has provider-specific options (docs/sandboxes.md). Raises `UserError` for a value out of range.
    """

    image: str = ""
    cpu: float = 1.0
    memory_mb: int = 2048
    disk_size_gb: float = 3
    gpu_count: int = 0
    timeout_seconds: float = 3600
    environment_vars: dict[str, str] = field(default_factory=dict)
    name: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def __new__(cls, *_: Any, **values: Any) -> Self:
        for ours, theirs in ENVIRONMENT_NAMES.items():
            if theirs in values:
                raise UserError(f"a SandboxConfig has {ours!r}; {theirs!r} is an argument of environments")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("cpu", "memory_mb", "disk_size_gb", "timeout_seconds"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UserError(f"{name}={value!r} of a sandbox must be a number above 0, and finite")
        if not isinstance(self.gpu_count, int) or self.gpu_count < 0:
            raise UserError(f"gpu_count={self.gpu_count!r} of a sandbox must be a whole number, not negative")
        self.environment_vars = {name: str(value) for name, value in self.environment_vars.items()}  # SDKs refuse 1
        for name, value in self.environment_vars.items():
            if not name or "=" in name or "\0" in f"{name}{value}":
                raise UserError(f"environment_vars of a sandbox has {name!r}={value!r}, which no variable can be")


@dataclass(eq=False)
class SandboxHandle:
    """Identifies a sandbox by its id at the provider. `provider_data` is private to the provider."""

    id: str
    provider_data: Any = None


@dataclass(frozen=True)
class ExecResult:
    """Result of a command. `exit_code` is 128 + signal if a signal ended it."""

    exit_code: int
    stdout: str
    stderr: str


def output_text(total: int, content: bytes) -> str:
    """Returns a stream of `total` bytes as text. `content` is all of it, or its two ends, with a note between them."""
    if left_out := total - len(content):
        half = len(content) // 2
        content = content[:half] + f"\n[... {left_out} bytes left out ...]\n".encode() + content[half:]
    return content.decode(errors="replace")


class SandboxProvider(ABC):
    """A service that runs sandboxes. Subclass it, and name the class by its dotted path in `get_provider`."""

    name: ClassVar[str] = ""
    """Name in records, by default the class's."""
    creates_per_second: ClassVar[float] = 1000.0
    """Most creations per second that the service allows."""
    extra_options: ClassVar[tuple[str, ...]] = ()
    """Names in `SandboxConfig.extra` besides `network`."""
    is_reusable: ClassVar[bool] = True
    """Whether creation is so slow that a pool reuses sandboxes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__dict__.get("name") or cls.__name__.removesuffix("SandboxProvider").lower()
        for method in ("create", "execute", "upload_bytes", "upload_file", "read_bytes", "destroy"):
            if method in cls.__dict__:
                setattr(cls, method, measured(method, cls.__dict__[method]))

    @abstractmethod
    async def create(self, config: SandboxConfig) -> SandboxHandle:
        """Creates a sandbox and waits until it runs. Leaves nothing behind when it fails or is cancelled."""

    @abstractmethod
    async def execute(
        self, handle: SandboxHandle, command: str, timeout: float = 60, working_dir: str | None = None
    ) -> ExecResult:
        """Runs a shell command. Raises `SandboxCommandTimeoutError` and `SandboxNotRunningError`."""

    @abstractmethod
    async def upload_bytes(self, handle: SandboxHandle, remote_path: str, content: bytes) -> None:
        """Writes a file and creates its parent folders."""

    @abstractmethod
    async def destroy(self, handle: SandboxHandle) -> None:
        """Ends a sandbox and all of its processes. Does nothing if the sandbox has already ended."""

    async def upload_file(self, handle: SandboxHandle, remote_path: str, local_path: str | Path) -> None:
        """Uploads a local file."""
        await self.upload_bytes(handle, remote_path, await asyncio.to_thread(Path(local_path).read_bytes))

    async def read_bytes(self, handle: SandboxHandle, remote_path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Returns the content of a file. Raises `SandboxError` if it is missing or larger than the limit."""
        step, content = MAX_OUTPUT_BYTES // 2, b""
        while True:  # in chunks, because output is capped
            quoted = shlex.quote(remote_path)
            is_readable = f"test -f {quoted} && test -r {quoted}"  # the exit code of `tail` is lost
            command = f"tail -c +{len(content) + 1} -- {quoted} | head -c {step} | base64 -w 0; {is_readable}"
            result = await self.execute(handle, command)
            if result.exit_code:
                raise SandboxError(f"cannot read {remote_path!r} in sandbox {handle.id!r}: {result.stderr.strip()}")
            piece = base64.b64decode(result.stdout)
            content += piece
            if len(content) > max_bytes:
                raise SandboxError(f"{remote_path!r} in sandbox {handle.id!r} has more than {max_bytes} bytes")
            if len(piece) < step:
                return content

    async def is_alive(self, handle: SandboxHandle) -> bool:
        """Returns whether the sandbox responds."""
        try:
            return (await self.execute(handle, "true", timeout=10)).exit_code == 0
        except SandboxError:
            return False

    async def find(self, run: str) -> list[SandboxHandle]:
        """Returns the sandboxes labeled with a run. Empty if the provider has no labels."""
        return []

    async def bulk_destroy(self, handles: Iterable[SandboxHandle]) -> None:
        """Destroys sandboxes concurrently. Tries all of them, then raises the first failure."""
        results = await asyncio.gather(*(self.destroy(handle) for handle in handles), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def destroy_sync(self, handle: SandboxHandle) -> None:
        """Calls `destroy` from code without an event loop."""
        self.bulk_destroy_sync([handle])

    def bulk_destroy_sync(self, handles: Iterable[SandboxHandle]) -> None:
        """Calls `bulk_destroy` from code without an event loop."""
        run_sync(self.bulk_destroy(handles))

    async def close(self) -> None:
        """Closes the provider's connections. Its sandboxes keep running."""
        return None


def run_sync(coroutine: Coroutine[Any, Any, R]) -> R:
    """Runs a coroutine in a new thread with its own event loop, and waits for the result."""
    with ThreadPoolExecutor(1, "sandbox") as threads:
        return threads.submit(copy_context().run, asyncio.run, coroutine).result()


PROVIDERS = {
    "local": "telescope.sandbox.local.LocalSandboxProvider",
    "docker": "telescope.sandbox.containers.DockerSandboxProvider",
    "podman": "telescope.sandbox.containers.PodmanSandboxProvider",
    "prime": "telescope.sandbox.prime.PrimeSandboxProvider",
    "modal": "telescope.sandbox.modal.ModalSandboxProvider",
    "daytona": "telescope.sandbox.daytona.DaytonaSandboxProvider",
    "e2b": "telescope.sandbox.e2b.E2BSandboxProvider",
}
"""Class of each provider that is part of Telescope."""


def provider_arguments(environments: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the `provider_kwargs` by provider that environments with these arguments use. They may contain a key."""
    found: dict[str, dict[str, Any]] = {}
    for kwargs in environments:
        given = kwargs.get("provider_kwargs") or {}
        name = str(kwargs.get("provider") or ("local" if given else ""))
        if name in PROVIDERS or "." in name:  # not one of models
            found[name] = found.get(name, {}) | given
    return found


def provider_class(name: str | None = None) -> type[SandboxProvider]:
    """Returns a provider's class, by default that of `local`. Raises `UserError` for an unknown name."""
    path = PROVIDERS.get(name or "local", name or "")
    if "." not in path:
        raise UserError(f"provider={name!r} is not known. Use one of {', '.join(PROVIDERS)}, or package.module.Class")
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"provider={name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, SandboxProvider)):
        raise UserError(f"provider={name!r} is not a subclass of telescope.sandbox.SandboxProvider")
    return found


def get_provider(name: str | None = None, **kwargs: Any) -> SandboxProvider:
    """Returns a provider, by default `local`. `name` may also be the dotted path of a class.

    Raises `UserError` for an unknown name, and `SandboxSetupError` if the provider cannot be used here.
    """
    found = provider_class(name)
    try:
        return found(**kwargs)
    except TypeError as error:
        names = ", ".join(kwargs) or "no arguments"  # without their values: one may be a key
        raise UserError(f"provider={name!r} cannot be made with {names}: {error}") from error
