"""Base of cloud and container providers.

Runs commands through a script, leaks no sandbox on a failed creation, and maps the SDK's errors with a table. A
provider passes a script to its service and returns the output. The script enforces the command's deadline, caps both
streams before they are sent, and prints them with the exit code around a marker, so a service needs only one stream and
one call. A command longer than `detach_after` seconds is started in the background and polled.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import logging
import math
import os
import posixpath
import re
import shlex
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from telescope.errors import UserError
from telescope.sandbox.base import MAX_OUTPUT_BYTES, ExecResult, SandboxConfig, SandboxHandle, SandboxProvider, run_sync
from telescope.sandbox.errors import (
    SandboxCommandTimeoutError,
    SandboxError,
    SandboxNotRunningError,
    SandboxOOMError,
    SandboxSetupError,
)

logger = logging.getLogger(__name__)

LABEL = "telescope_run"
MAX_INLINE_BYTES = 24_000
"""Longer commands are uploaded: a service accepts 64 kB in a command line, and base64 makes commands longer."""
GRACE_SECONDS = 10
"""Extra time for a service after the command's own deadline, so that the script reports first."""
CALL_SECONDS = 60
"""Longest time for a service to list or destroy sandboxes."""
POLL_SECONDS = (0.5, 5.0)
"""First and longest pause between two polls of a detached command."""
POLL_FAILURES = 5
"""Polls in a row that may fail. A poll reads only, so it can be repeated."""

# Both children lead a session, so that a signal reaches their groups. Background processes keep running. A command may
# do `pkill sleep`, or remove the folder of its files: at `:` instead of `true`, sh would exit then.
_RUN = """
shell=$(command -v bash || command -v sh)
( cd -- {folder} && exec setsid "$shell" {program} ) >{work}/out 2>{work}/err </dev/null &
p=$!
setsid sh -c "sleep {timeout} || exit; true >{work}/late; kill -9 -$p" </dev/null >/dev/null 2>&1 &
w=$!
wait $p; c=$?
kill -9 -$w || kill -9 $w
[ -f {work}/late ] && c=late
echo $c >{work}/code.new; mv {work}/code.new {work}/code
"""
# `head` bounds what is read, because a background process may still write faster than that. `c` is empty in a poll.
# After _RUN it has the exit code, also if the command filled the disk or removed its files.
_REPORT = """
show() {{
  n=$(wc -c <$1) || return
  if [ $n -le {limit} ]; then head -c $n $1; return; fi
  head -c {half} $1; printf '\\n[... %d bytes left out ...]\\n' $((n - 2 * {half})); tail -c {half} $1 | head -c {half}
}}
[ "$c" ] || c=$(cat {work}/code 2>/dev/null) || exit 0
show {work}/out; printf '\\n%s %s\\n' {mark} $c; show {work}/err
"""


class RemoteSandboxProvider(SandboxProvider):
    """A provider that runs scripts. Subclasses implement `_start`, `_run`, `_upload`, `_destroy` and `_find`."""

    default_image: ClassVar[str | None] = "python:3.12-slim"
    """Image if neither the configuration nor `DEFAULT_DOCKER_IMAGE` names one. None: images are not Docker's."""
    detach_after: ClassVar[float] = 300
    """Commands with a longer time limit, in seconds, are detached instead of waiting in one call of the service."""
    makes_folders: ClassVar[bool] = False
    """Whether an upload creates missing parent folders of any absolute path."""
    error_table: ClassVar[tuple[tuple[str, str, type[Exception]], ...]] = ()
    """Patterns for the class and message of an SDK error, and our class. The first match counts."""
    setup_hint: ClassVar[str] = ""
    """How to get the keys and quota that the service needs."""

    def __init__(self) -> None:
        self._undoing: set[asyncio.Future[None]] = set()

    @abstractmethod
    async def _start(self, config: SandboxConfig) -> SandboxHandle:
        """Creates a sandbox and returns as soon as its id is known."""

    async def _wait_until_running(self, handle: SandboxHandle) -> None:
        return None

    @abstractmethod
    async def _run(self, handle: SandboxHandle, script: str, timeout: int) -> ExecResult:
        """Runs a script with sh."""

    @abstractmethod
    async def _upload(self, handle: SandboxHandle, path: str, content: bytes) -> None:
        """Writes a file."""

    @abstractmethod
    async def _destroy(self, handle: SandboxHandle) -> None:
        """Ends a sandbox. The handle may have nothing but the id."""

    @abstractmethod
    async def _find(self, run: str) -> list[SandboxHandle]:
        """Returns the sandboxes labeled with a run."""

    async def create(self, config: SandboxConfig) -> SandboxHandle:
        image = config.image
        if not image and self.default_image is not None:
            image = os.environ.get("DEFAULT_DOCKER_IMAGE") or self.default_image
        starting = asyncio.ensure_future(self._start(replace(config, image=image)))
        with self._translated("create"):
            try:
                handle = await asyncio.shield(starting)  # a request that was sent creates a billed sandbox
                await self._wait_until_running(handle)
                return handle
            except BaseException:
                undo = asyncio.ensure_future(self._undo(starting))
                self._undoing.add(undo)  # a second cancellation must not stop it
                undo.add_done_callback(self._undoing.discard)
                await asyncio.shield(undo)
                raise

    async def _undo(self, starting: asyncio.Future[SandboxHandle]) -> None:
        try:
            handle = await starting
        except Exception as error:
            if not (sandbox_id := getattr(error, "sandbox_id", None)):  # Daytona: the sandbox exists despite the error
                return
            handle = SandboxHandle(sandbox_id)
        try:
            await self.destroy(handle)
        except Exception:
            logger.warning("the sandbox %s of an interrupted creation was not destroyed", handle.id, exc_info=True)

    async def execute(
        self, handle: SandboxHandle, command: str, timeout: float = 60, working_dir: str | None = None
    ) -> ExecResult:
        if "\0" in command:
            raise UserError("a command of a sandbox must not have NUL characters")
        mark = uuid.uuid4().hex
        work = f"/tmp/.telescope-{mark}"
        begin = f"mkdir -p {work} || exit"
        encoded = command.encode()
        program = f'-c "$(printf %s {base64.b64encode(encoded).decode()} | base64 -d)"'  # `pkill -f` must not find it
        if len(encoded) > MAX_INLINE_BYTES:
            await self.upload_bytes(handle, program := f"{work}/command", encoded)
        folder = shlex.quote(working_dir or ".")
        run = _RUN.format(work=work, folder=folder, program=program, timeout=f"{timeout:g}")
        report = _REPORT.format(work=work, mark=mark, limit=MAX_OUTPUT_BYTES, half=MAX_OUTPUT_BYTES // 2)
        if timeout <= self.detach_after:
            script = f"{begin}\nexec 2>/dev/null\n{run}{report}rm -rf {work}"
            with self._translated("execute", handle.id, command, timeout):
                result = await self._bounded(handle, script, timeout)
        else:
            with self._translated("start of a command", handle.id):
                detached = f"setsid sh -c {shlex.quote(run)} </dev/null >/dev/null 2>&1 &"
                result = await self._bounded(handle, f"{begin}\n{detached}", 30)
            if not result.exit_code:
                result = await self._poll(handle, f"c=\n{report}", timeout)
                with contextlib.suppress(Exception):  # the sandbox may still be used
                    await self._bounded(handle, f"rm -rf {work}", 30)
        output, found, rest = result.stdout.rpartition(f"\n{mark} ")
        if not found and result.exit_code == 137:  # the script was killed, as by `kill -9 -1`, or the sandbox
            with self._translated("check", handle.id):
                if not (await self._bounded(handle, "true", 10)).exit_code:
                    return ExecResult(137, "", "")
        code, _, errors = rest.partition("\n")
        if code == "late" or (not found and result.exit_code in (-1, 0)):
            raise SandboxCommandTimeoutError(command, timeout, handle.id)
        if not code:
            kind = SandboxOOMError if result.exit_code == 137 else SandboxError
            shown = (result.stderr.strip() or output.strip() or rest.strip())[-500:]
            why = "its disk may be full" if found else f"exit code {result.exit_code}. {shown}"
            raise kind(f"sandbox {handle.id!r} did not run a command: {why}")
        return ExecResult(int(code), output, errors)

    async def _poll(self, handle: SandboxHandle, report: str, timeout: float) -> ExecResult:
        """Waits until a detached command has ended. Returns an empty result after `timeout`."""
        clock, pause, failures = asyncio.get_running_loop().time, POLL_SECONDS[0], 0
        deadline = clock() + timeout + GRACE_SECONDS
        result = ExecResult(0, "", "")
        while not result.exit_code and not result.stdout and clock() < deadline:
            await asyncio.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])
            try:
                with self._translated("poll of a command", handle.id):
                    result = await self._bounded(handle, report, 30)
            except (SandboxNotRunningError, SandboxOOMError):
                raise
            except SandboxError:
                failures += 1
                if failures > POLL_FAILURES:
                    raise
            else:
                failures = 0
        return result

    async def _bounded(self, handle: SandboxHandle, script: str, timeout: float) -> ExecResult:
        seconds = math.ceil(timeout) + GRACE_SECONDS
        try:
            async with asyncio.timeout(seconds + GRACE_SECONDS):
                return await self._run(handle, script, seconds)
        except TimeoutError:  # not of the command, which the script would report
            why = f"did not answer within {seconds + GRACE_SECONDS} s"
            raise SandboxError(f"sandbox {handle.id!r} of {self.name} {why}") from None

    async def upload_bytes(self, handle: SandboxHandle, remote_path: str, content: bytes) -> None:
        with self._translated(f"upload of {remote_path!r}", handle.id):
            if not self.makes_folders or not remote_path.startswith("/"):
                folder, name = posixpath.split(remote_path)
                quoted = shlex.quote(folder or ".")
                made = await self._bounded(handle, f"mkdir -p -- {quoted} && cd -- {quoted} && pwd", 30)
                if made.exit_code:
                    raise SandboxError(f"cannot make {folder!r} in sandbox {handle.id!r}: {made.stderr.strip()}")
                remote_path = posixpath.join(made.stdout.rstrip("\n"), name)
            async with asyncio.timeout(600):
                await self._upload(handle, remote_path, content)

    async def destroy(self, handle: SandboxHandle) -> None:
        with contextlib.suppress(SandboxNotRunningError), self._translated("destroy", handle.id):
            async with asyncio.timeout(CALL_SECONDS):
                await self._destroy(handle)

    def bulk_destroy_sync(self, handles: Iterable[SandboxHandle]) -> None:
        async def work() -> None:
            try:
                await self.bulk_destroy(handles)
            finally:
                await self.close()  # connections of this thread's event loop

        run_sync(work())

    async def find(self, run: str) -> list[SandboxHandle]:
        with self._translated("list"):
            async with asyncio.timeout(CALL_SECONDS):  # runs do this when they start and end
                return await self._find(run)

    @contextlib.contextmanager
    def _translated(self, call: str, sandbox_id: str = "", command: str = "", timeout: float = 0) -> Iterator[None]:
        """Re-raises errors of the SDK as Telescope's. Only a `command` can exceed its time limit."""
        try:
            yield
        except (SandboxError, SandboxSetupError):
            raise
        except Exception as error:
            kind = self._kind_of(error)
            text = f"{call}: {type(error).__name__}: {error}"
            if issubclass(kind, SandboxCommandTimeoutError):
                if command:
                    raise kind(command, timeout, sandbox_id) from error
                kind = SandboxError
            if issubclass(kind, SandboxSetupError):
                raise kind(f"The sandbox provider {self.name!r} refuses: {text}. {self.setup_hint}") from error
            raise kind(f"{f'sandbox {sandbox_id!r} of ' if sandbox_id else ''}{self.name}: {text}") from error

    def _kind_of(self, error: Exception) -> type[Any]:
        names = [kind.__name__ for kind in type(error).__mro__]  # by name, because SDKs move classes between versions
        for pattern, message, kind in self.error_table:
            if any(re.fullmatch(pattern, name) for name in names) and re.search(message, str(error)):
                return kind
        return SandboxError


class CloudSandboxProvider(RemoteSandboxProvider):
    """A cloud provider: imports its SDK late, and keeps a client for each event loop.

    Without `api_key` the SDK finds the key itself.
    """

    modules: ClassVar[tuple[str, ...]]
    """Possible names of the SDK's module, in order of preference."""
    package: ClassVar[str]
    key_variables: ClassVar[tuple[str, ...]]
    """Environment variables that may have the key."""
    key_file: ClassVar[str] = ""
    """File in the home folder that may have the key instead."""

    def __init__(self, api_key: str | None = None) -> None:
        super().__init__()
        self.api_key = api_key
        module = next(filter(find_spec, self.modules), self.modules[0])
        try:
            self.sdk: Any = importlib.import_module(module)
        except ImportError as error:
            raise SandboxSetupError(
                f"The sandbox provider {self.name!r} needs the package {self.package}. "
                f"Install it: uv pip install {self.package}   (or: pip install {self.package})"
            ) from error
        has_file = bool(self.key_file) and Path(self.key_file).expanduser().exists()
        if not (api_key or has_file or any(map(os.environ.get, self.key_variables))):
            raise SandboxSetupError(f"The sandbox provider {self.name!r} has no key. {self.setup_hint}")
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    def _connect(self) -> Any:
        """Returns a new SDK client, if the SDK has one."""
        raise NotImplementedError

    @property
    def client(self) -> Any:
        """Returns the client of the current event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = self._connect()
        return self._clients[loop]

    async def close(self) -> None:
        if client := self._clients.pop(asyncio.get_running_loop(), None):
            await (client.aclose if hasattr(client, "aclose") else client.close)()  # depends on the SDK

    async def _attach(self, sandbox_id: str) -> Any:
        """Returns the SDK's object of an existing sandbox, if the SDK has one."""
        raise NotImplementedError

    async def _sandbox(self, handle: SandboxHandle) -> Any:
        if handle.provider_data is None:
            handle.provider_data = await self._attach(handle.id)
        return handle.provider_data


def run_label(config: SandboxConfig) -> dict[str, str]:
    """Returns the label by which `find` finds a run's sandboxes."""
    return {LABEL: str(config.extra["run"])} if config.extra.get("run") else {}


def unique_name(config: SandboxConfig) -> str:
    """Returns a name unique to the sandbox."""
    return f"{config.name or 'telescope'}-{uuid.uuid4().hex[:12]}"
