"""Runs sandboxes in local containers through the command line of docker or podman."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import shutil
from typing import ClassVar

from telescope.sandbox import errors
from telescope.sandbox.base import ExecResult, SandboxConfig, SandboxHandle
from telescope.sandbox.remote import LABEL, RemoteSandboxProvider, run_label, unique_name

MAX_PROCESSES = 1024
"""Processes and threads of a container."""
_GENERAL_HELP = re.compile(r" Is the docker daemon running\?|\n+(Run|See) '.* --help'.*")
"""What docker adds to an error without saying more about it."""


_LIVE = "end=$(($(date +%s) + {})); while left=$((end - $(date +%s))); [ $left -gt 0 ]; do sleep $left & wait; done"
"""Process 1 of a container, which reaps orphans. `kill -9 -1` inside does not reach it."""


class ContainerError(Exception):
    """docker or podman itself failed. The text is its error output."""


class ContainerSandboxProvider(RemoteSandboxProvider):
    """Runs a container with a read-only image, a writable /tmp, and a main process that ends with its lifetime.

    `extra["network"]: true` enables the network, `extra["read_only"]: false` makes the image writable.
    """

    extra_options = ("read_only",)
    program: ClassVar[str]
    detach_after = math.inf
    error_table = (
        ("ContainerError", "(?i)cannot connect|daemon running|permission denied.*(docker|podman)",
         errors.SandboxSetupError),
        ("ContainerError",
         "(?i)no such container|no container with|is not running|running containers|has exited|already in progress",
         errors.SandboxNotRunningError),
        ("ContainerError", "(?i)toomanyrequests|i/o timeout|tls handshake|temporar", errors.SandboxBusyError),
        ("ContainerError", "(?i)find image|pull access|no such image|reference format|short-name|initializing source",
         errors.SandboxImagePullError),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        if not shutil.which(self.program):
            message = f"The sandbox provider {self.name!r} needs {self.program}. {self.setup_hint}"
            raise errors.SandboxSetupError(message)

    async def _call(self, *arguments: str, content: bytes | None = None) -> ExecResult:
        """Runs docker or podman. Kills it on cancellation or timeout."""
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            self.program, *arguments, stdin=null if content is None else pipe, stdout=pipe, stderr=pipe
        )
        try:
            streams = await process.communicate(content)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return ExecResult(process.returncode or 0, *(stream.decode(errors="replace") for stream in streams))

    async def _checked(self, *arguments: str, content: bytes | None = None) -> str:
        result = await self._call(*arguments, content=content)
        if result.exit_code:
            raise _error(result)
        return result.stdout

    async def _start(self, config: SandboxConfig) -> SandboxHandle:
        name, memory = unique_name(config), f"{config.memory_mb}m"
        options = ["--name", name, "--memory", memory, "--memory-swap", memory, "--cpus", f"{config.cpu:g}"]
        options += ["--pids-limit", str(MAX_PROCESSES), "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        options += ["--tmpfs", f"/tmp:rw,exec,size={math.ceil(config.disk_size_gb * 1024)}m", "--workdir", "/tmp"]
        if not config.extra.get("network"):
            options += ["--network", "none"]
        if config.extra.get("read_only", True):
            options += ["--read-only"]
        if config.gpu_count:
            options += ["--gpus", str(config.gpu_count)]
        for key, value in run_label(config).items():
            options += ["--label", f"{key}={value}"]
        for key, value in config.environment_vars.items():
            options += ["--env", f"{key}={value}"]
        main = ("--entrypoint", "sh", config.image, "-c", _LIVE.format(math.ceil(config.timeout_seconds)))
        try:
            await self._checked("run", "--detach", "--rm", *options, *main)
        except ContainerError:
            with contextlib.suppress(ContainerError):
                await self._checked("rm", "--force", name)  # created, but not started
            raise
        return SandboxHandle(name)

    async def _run(self, handle: SandboxHandle, script: str, timeout: int) -> ExecResult:
        result = await self._call("exec", handle.id, "sh", "-c", script)
        if result.exit_code and self._kind_of(error := _error(result)) is not errors.SandboxError:
            raise error
        return result

    async def _upload(self, handle: SandboxHandle, path: str, content: bytes) -> None:
        # not `cp`, which cannot write below a tmpfs
        command = ("sh", "-c", 'cat >"$1"', "sh", path)
        await self._checked("exec", "--interactive", handle.id, *command, content=content)

    async def _destroy(self, handle: SandboxHandle) -> None:
        await self._checked("rm", "--force", handle.id)

    async def _find(self, run: str) -> list[SandboxHandle]:
        arguments = ("--all", "--filter", f"label={LABEL}={run}", "--format", "{{.Names}}")
        return [SandboxHandle(name) for name in (await self._checked("ps", *arguments)).split()]


def _error(result: ExecResult) -> ContainerError:
    return ContainerError(_GENERAL_HELP.sub("", result.stderr).strip(" .\n") or f"exit code {result.exit_code}")


class DockerSandboxProvider(ContainerSandboxProvider):
    """Runs containers with docker."""

    program = "docker"
    setup_hint = "Install it (https://docs.docker.com/engine/install), start it, and let this user use it."


class PodmanSandboxProvider(ContainerSandboxProvider):
    """Runs containers with podman, which needs no daemon."""

    program = "podman"
    setup_hint = "Install it: apt-get install podman   (or: https://podman.io/docs/installation)"
