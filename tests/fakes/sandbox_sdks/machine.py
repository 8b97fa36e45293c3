"""Sandboxes of the fake SDKs: folders of this machine, in which commands really run, with a /tmp of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "TELESCOPE_FAKE_SANDBOX"


@dataclass
class Box:
    """One sandbox."""

    settings: dict[str, object]
    labels: dict[str, str]
    network: bool
    variables: dict[str, str]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="fake-sandbox-", dir="/var/tmp")))

    def command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        """Returns the command line and the environment that run a command in the sandbox."""
        isolated = [] if self.network else ["--unshare-net"]
        where = ["--bind", "/", "/", "--dev-bind", "/dev", "/dev", "--bind", str(self.folder), "/tmp"]
        line = ["bwrap", *where, *isolated, "--cap-drop", "ALL", "--chdir", "/tmp", "--", *arguments]
        return line, os.environ | self.variables | {MARK: self.id}

    async def run(self, *arguments: str) -> tuple[int, bytes, bytes]:
        """Runs a command. Returns its exit code and both streams."""
        line, variables = self.command(*arguments)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *line, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=variables
        )
        output, errors = await process.communicate()
        code = process.returncode or 0
        return (128 - code if code < 0 else code), output, errors

    def write(self, path: str, content: bytes, *, parents: bool) -> None:
        """Writes a file below /tmp."""
        inside = self.folder / Path(path).relative_to("/tmp")
        if parents:
            inside.parent.mkdir(parents=True, exist_ok=True)
        inside.write_bytes(content)

    def end(self) -> None:
        """Kills the processes of the sandbox, and removes its folder."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.id}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


class Machine:
    """The sandboxes of a fake service, and failures that its next calls raise."""

    def __init__(self) -> None:
        self.boxes: dict[str, Box] = {}
        self.num_created = 0
        self.calls: list[str] = []
        self.failures: dict[str, BaseException] = {}
        self.create_seconds = 0.05

    async def step(self, call: str) -> None:
        """Notes a call, and raises the failure that waits for it."""
        self.calls.append(call)
        if failure := self.failures.pop(call, None):
            raise failure

    async def create(self, box: Box) -> Box:
        """Adds a sandbox. It exists before the caller hears of it."""
        await self.step("create")
        self.boxes[box.id] = box
        self.num_created += 1
        await asyncio.sleep(self.create_seconds)
        return box

    def remove(self, name: str) -> bool:
        """Ends a sandbox. Returns whether there was one."""
        box = self.boxes.pop(name, None)
        if box is not None:
            box.end()
        return box is not None

    def labelled(self, labels: dict[str, str]) -> Iterator[Box]:
        """Returns the sandboxes with some labels."""
        return (box for box in list(self.boxes.values()) if labels.items() <= box.labels.items())

    def close(self) -> None:
        """Ends all sandboxes."""
        for name in list(self.boxes):
            self.remove(name)


MACHINE = Machine()


def add_errors(module: dict[str, Any], base: type[Exception], *names: str) -> None:
    """Adds errors of an SDK to its module, for tests that raise them."""
    module |= {name: type(name, (base,), {"__module__": module["__name__"]}) for name in names}
