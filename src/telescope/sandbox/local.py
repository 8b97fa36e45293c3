"""Runs sandboxes on this machine with bubblewrap, without an account, a daemon or root.

Each sandbox has private processes, files and network. It is one long-lived bubblewrap with `exec_server` inside, so a
command costs a fork, and files and background processes survive between commands. Its files are in memory, at most
`disk_size_gb`. It has `/usr` and this Python read-only, no capabilities, and no network except a given endpoint. It
ends with this process.

`local` shares the kernel of the host. Use a provider with its own kernel for deliberately hostile code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import py_compile
import shutil
import tempfile
import threading
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import psutil

from telescope.errors import UserError
from telescope.sandbox import exec_server
from telescope.sandbox.base import (
    ENDPOINT_PORT,
    MAX_FILE_BYTES,
    MAX_OUTPUT_BYTES,
    ExecResult,
    SandboxConfig,
    SandboxHandle,
    SandboxProvider,
)
from telescope.sandbox.cgroups import Cgroup, are_usable, remove_old
from telescope.sandbox.errors import SandboxError, SandboxNotRunningError, SandboxSetupError
from telescope.sandbox.local_sandbox import PYTHON, LocalSandbox, kill_marked, marked

logger = logging.getLogger(__name__)

R = TypeVar("R")

WORKSPACE = "/workspace"
MAX_PROCESSES = 256
START_SECONDS = 30.0
UNPRIVILEGED_USER = 65534
"""User id that owns no file."""
SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64")
SYSTEM_FILES = (
    "/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ca-certificates",
    "/etc/localtime",
)  # fmt: skip
ENDPOINT = "/run/telescope.sock"
CLOSED = "the provider of local sandboxes was closed"
INSTALL = """The sandbox provider 'local' needs bubblewrap. Install it:
  Debian, Ubuntu:  apt-get install bubblewrap
  Fedora, RHEL:    dnf install bubblewrap
  Arch:            pacman -S bubblewrap
Or name another provider (provider: docker, prime, modal, daytona, e2b)."""


class LocalSandboxProvider(SandboxProvider):
    """Runs sandboxes with bubblewrap.

    A config's `image` is a folder with a root file system, by default this machine's. `extra` may have `read_only`, a
    list of folders to mount read-only; `endpoint`, a Unix socket that the sandbox reaches as port 8000 of its loopback;
    and `max_processes`. Raises `SandboxSetupError` without bubblewrap.
    """

    extra_options = ("read_only", "endpoint", "max_processes")
    is_reusable = False

    def __init__(self, bwrap: str = "bwrap") -> None:
        found = shutil.which(bwrap)
        if found is None:
            raise SandboxSetupError(INSTALL)
        self._bwrap = found
        remove_old()
        self._has_cgroups = are_usable()
        self._creating: dict[str, asyncio.Task[Any]] = {}
        self._sandboxes: dict[str, LocalSandbox] = {}
        """Sandboxes by id, until they are destroyed."""
        self._has_warned = False
        self._code = os.memfd_create("exec_server.py")
        with tempfile.TemporaryDirectory() as folder:  # compiled, because compiling takes a third of the start time
            compiled = py_compile.compile(exec_server.__file__, f"{folder}/exec_server.pyc", doraise=True)
            os.write(self._code, Path(str(compiled)).read_bytes())
        # A separate thread: bubblewrap ends with the thread that started it, and calls may come from any event loop.
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="sandboxes", daemon=True)
        self._thread.start()

    async def create(self, config: SandboxConfig) -> SandboxHandle:
        name = f"local-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            return await self._run(self._create(name, config))
        except asyncio.CancelledError:
            if not self._is_closed:  # in the provider's loop, so that it finishes even if this loop ends
                abandoning = asyncio.run_coroutine_threadsafe(self._abandon(name), self._loop)
                await asyncio.shield(asyncio.wrap_future(abandoning))
            raise

    async def _abandon(self, name: str) -> None:
        """Destroys a sandbox whose creation was cancelled, even if the creation has just ended."""
        if (creating := self._creating.get(name)) is not None:
            if not creating.cancelling():  # a second cancellation would end its wait for the destruction
                creating.cancel()
            await asyncio.wait({creating})
        if (sandbox := self._sandboxes.pop(name, None)) is not None:
            await sandbox.destroy()

    async def execute(
        self, handle: SandboxHandle, command: str, timeout: float = 60, working_dir: str | None = None
    ) -> ExecResult:
        return await self._run(self._sandbox(handle).execute(command, timeout, working_dir or WORKSPACE))

    async def upload_bytes(self, handle: SandboxHandle, remote_path: str, content: bytes) -> None:
        if len(content) > MAX_FILE_BYTES:
            raise SandboxError(f"{remote_path!r} has {len(content)} bytes; an upload has at most {MAX_FILE_BYTES}")
        await self._run(self._sandbox(handle).file(b"write", remote_path, content))

    async def read_bytes(self, handle: SandboxHandle, remote_path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        return await self._run(self._sandbox(handle).file(b"read", remote_path, str(max_bytes).encode()))

    async def is_alive(self, handle: SandboxHandle) -> bool:
        sandbox = self._sandboxes.get(handle.id)
        return sandbox is not None and sandbox.ended is None

    async def destroy(self, handle: SandboxHandle) -> None:
        if (sandbox := self._sandboxes.get(handle.id)) is not None:
            with contextlib.suppress(SandboxNotRunningError):
                await self._run(sandbox.destroy())
            self._sandboxes.pop(handle.id, None)
        else:  # created by another process, which may have ended
            await asyncio.to_thread(kill_marked, handle.id.encode())

    async def find(self, run: str) -> list[SandboxHandle]:
        return [SandboxHandle(name) for name in {name for _, name in await asyncio.to_thread(marked, run.encode())}]

    async def close(self) -> None:
        """Destroys the remaining sandboxes and ends the provider's thread."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()
        os.close(self._code)

    async def _end(self) -> None:
        """Destroys all sandboxes, and waits for the calls that fail because of it."""
        await asyncio.sleep(0)  # starts the last calls
        await asyncio.gather(*map(self._abandon, [*self._creating, *self._sandboxes]))
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*calls, return_exceptions=True)

    def _sandbox(self, handle: SandboxHandle) -> LocalSandbox:
        sandbox = self._sandboxes.get(handle.id)
        if sandbox is None:
            raise SandboxNotRunningError(f"the sandbox {handle.id!r} has ended, or belongs to another process")
        return sandbox

    async def _run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        if self._is_closed:
            coroutine.close()
            raise SandboxNotRunningError(CLOSED)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _create(self, name: str, config: SandboxConfig) -> SandboxHandle:
        task = asyncio.current_task()
        assert task is not None
        if self._is_closed:
            raise SandboxNotRunningError(CLOSED)
        self._creating[name] = task
        task.add_done_callback(lambda _: self._creating.pop(name, None))
        num_processes = config.extra.get("max_processes", MAX_PROCESSES)
        if type(num_processes) is not int or num_processes < 1:
            raise UserError(f"max_processes, in extra of a local sandbox, is {num_processes!r}: set a number from 1")
        memory, disk = int(config.memory_mb * 2**20), int(config.disk_size_gb * 2**30)
        cgroup = None
        if self._has_cgroups:
            cgroup = Cgroup(name, memory_bytes=memory + disk, num_processes=num_processes, cpu=config.cpu)
        enforced = set() if cgroup is None else cgroup.enforced
        sandbox = LocalSandbox(name, cgroup)
        try:
            command, user = self._command(config, disk)
            limits = (MAX_OUTPUT_BYTES, num_processes, 0 if "memory" in enforced else memory)
            self._warn_of_soft_limits(enforced, user)
            async with asyncio.timeout(START_SECONDS):
                await sandbox.start(command, self._code, limits, user, f"{name} {config.extra.get('run', '')}")
            if config.extra.get("endpoint"):
                await sandbox.file(b"relay", ENDPOINT, str(ENDPOINT_PORT).encode())
            sandbox.end_after(config.timeout_seconds)
        except BaseException as error:
            await sandbox.destroy()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"the sandbox {name!r} did not start within {START_SECONDS:g} s") from None
            raise
        self._sandboxes[name] = sandbox
        return SandboxHandle(name)

    def _command(self, config: SandboxConfig, disk: int) -> tuple[list[str], int | None]:
        """Returns bubblewrap's command line without the server, and the user to run it as (None: the current user)."""
        root = Path(config.image or "/")
        if not (root / "usr").is_dir():
            raise UserError(
                f"image={config.image!r} of a local sandbox must be a folder with a root file system, or empty for "
                "this machine's. Images of containers need provider: docker or podman"
            )
        if config.gpu_count or config.extra.get("network"):
            raise UserError("a local sandbox has no GPU and no network: name another provider for gpu_count or network")
        machine_mb = psutil.virtual_memory().total // 2**20
        if config.memory_mb > machine_mb:
            raise UserError(
                f"memory_mb={config.memory_mb} of a local sandbox is above this machine's {machine_mb}: lower it"
            )
        shown, endpoint = _paths_of(config, "read_only"), _paths_of(config, "endpoint")
        user = None
        # Root could read every mounted file, and is exempt from the limit of processes.
        if os.geteuid() == 0 and all(map(_is_open_to_all, (root, PYTHON, *shown, *(path.parent for path in endpoint)))):
            user = UNPRIVILEGED_USER
        command = [
            self._bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000",
            "--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox",
            "--size", str(disk), "--tmpfs", "/", "--ro-bind", str(root / "usr"), "/usr",
        ]  # fmt: skip
        for folder in SYSTEM_FOLDERS:
            if (root / folder).is_symlink():
                command += ["--symlink", os.readlink(root / folder), f"/{folder}"]
            elif (root / folder).is_dir():
                command += ["--ro-bind", str(root / folder), f"/{folder}"]
        for file in SYSTEM_FILES:
            command += ["--ro-bind-try", str(root / file[1:]), file]
        for path in [PYTHON, *shown]:
            if not path.is_relative_to("/usr"):
                command += ["--ro-bind", str(path), str(path)]
        command += ["--proc", "/proc", "--remount-ro", "/proc"]  # its owner may write to some files, e.g. of /proc/sys
        command += ["--dev", "/dev", "--size", str(disk), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        command += ["--perms", "1777", "--dir", "/tmp", "--dir", "/run", "--dir", WORKSPACE]
        command += ["--chdir", WORKSPACE, "--clearenv"]
        threads = str(max(1, math.ceil(config.cpu)))
        variables = {
            "PATH": f"{PYTHON}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": WORKSPACE, "USER": "sandbox", "LANG": "C.UTF-8", "TMPDIR": "/tmp", "OMP_NUM_THREADS": threads,
        }  # fmt: skip
        for path in endpoint:
            command += ["--bind", str(path), ENDPOINT]
        for key, value in {**variables, **config.environment_vars}.items():
            command += ["--setenv", key, value]
        return command, user

    def _warn_of_soft_limits(self, enforced: set[str], user: int | None) -> None:
        """Logs once which limits the kernel cannot enforce for a whole sandbox."""
        by_rlimit = {"processes"} if user is not None or os.geteuid() else set()
        consequences = {"memory": "of each process, not of all", "processes": "none", "cpu": "none"}
        soft = [f"{name} ({what})" for name, what in consequences.items() if name not in enforced | by_rlimit]
        if soft and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Local sandboxes: no cgroups may be made here, so these limits are soft: %s. "
                "TELESCOPE_CGROUP names a delegated folder of cgroups (docs/sandboxes.md)",
                ", ".join(soft),
            )


def _paths_of(config: SandboxConfig, option: str) -> list[Path]:
    """Returns the path or paths in an option of `extra`. Raises `UserError` for a missing path, or another value."""
    named = config.extra.get(option) or []
    named = named if isinstance(named, list | tuple) else [named]
    if not all(isinstance(path, str | Path) for path in named):
        raise UserError(f"{option}, in extra of a local sandbox, is {config.extra[option]!r}: set a path, or a list")
    paths = list(map(Path, named))
    for path in paths:
        if not (path.is_absolute() and path.exists()):
            raise UserError(f"{str(path)!r}, in extra of a local sandbox, must be an absolute path that exists")
    return paths


def _is_open_to_all(path: Path) -> bool:
    """Returns whether any user of this machine may enter a folder."""
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.resolve().parents))
