"""One local sandbox: its bubblewrap process and the connection to `exec_server` inside.

Everything runs in the provider's event loop. Data from inside is not trusted: sizes are bounded, and a sandbox that
does not respond or breaks the protocol is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from telescope.errors import UserError
from telescope.sandbox import exec_server
from telescope.sandbox.base import MAX_FILE_BYTES, ExecResult, output_text
from telescope.sandbox.cgroups import Cgroup
from telescope.sandbox.errors import (
    SandboxCommandTimeoutError,
    SandboxError,
    SandboxNotRunningError,
    SandboxOOMError,
    SandboxSetupError,
)
from telescope.utils.child_guard import values_of_variable

TOO_OLD = ". It needs bubblewrap 0.8 or newer, as Debian 12 and Ubuntu 24.04 have it. Or name another provider."
MARK_VARIABLE = "TELESCOPE_SANDBOX"
"""Environment variable of bubblewrap itself, outside the sandbox. Has the sandbox's id and its run's label."""
PYTHON = Path(sys.base_prefix).resolve()
"""Folder of the Python that runs the server, inside as outside. uv names it by a link, which is not there inside."""
INTERPRETER = f"{PYTHON}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
"""By its version, because `python3` may be an older one of the system, as on Ubuntu 22.04."""
REPLY_SECONDS = 10.0
"""Time beyond a command's limit within which the sandbox must respond."""
REPLY = struct.Struct(">IiQIQI")
"""Head of a reply, see `exec_server`."""
NO_NAMESPACES = """
It needs user namespaces. Debian: sysctl kernel.unprivileged_userns_clone=1; Ubuntu 24.04: an AppArmor profile for
/usr/bin/bwrap, or sysctl kernel.apparmor_restrict_unprivileged_userns=0; in a container: --security-opt
seccomp=unconfined --security-opt apparmor=unconfined. Or name another provider."""


class LocalSandbox:
    """One bubblewrap process. Use it from the provider's event loop."""

    def __init__(self, name: str, cgroup: Cgroup | None) -> None:
        self.name = name
        self.ended: SandboxError | SandboxSetupError | None = None
        self._cgroup = cgroup
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._replies: dict[int, asyncio.Future[tuple[int, list[tuple[int, bytes]]]]] = {0: asyncio.Future()}
        self._numbers = itertools.count(1)
        self._reading: asyncio.Task[None] | None = None
        self._ending: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, command: list[str], code: int, limits: tuple[int, ...], user: int | None, mark: str) -> None:
        """Starts bubblewrap and waits for the server inside, whose program is the file `code`."""
        ours, theirs = socket.socketpair()
        server = [INTERPRETER, "-I", "-S", f"/proc/self/fd/{code}", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(  # noqa: ASYNC220 (by vfork, in the loop of the provider alone)
                [*command, "--", *server, *map(str, limits)], pass_fds=[theirs.fileno(), code],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                env={MARK_VARIABLE: mark}, user=user, group=user, extra_groups=None if user is None else [], cwd="/",
            )  # fmt: skip
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**20)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._reading = asyncio.ensure_future(self._read(reader))
        if self._cgroup is not None:  # the first move takes the kernel some ms, during which the server starts
            with contextlib.suppress(ProcessLookupError):  # bubblewrap failed, and says why
                await asyncio.to_thread(self._cgroup.add, self._process.pid)
        await self._replies[0]
        if self._cgroup is not None:  # the server, which may have been forked before that move
            try:
                self._cgroup.add(_child(self._process.pid))
            except (OSError, ValueError) as error:
                raise SandboxNotRunningError(f"the sandbox {self.name!r} ended while it started: {error}") from error
        del self._replies[0]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Passes replies to the calls that wait for them until the sandbox ends."""
        why = ""
        try:
            while True:
                number, code, *sizes = REPLY.unpack(await reader.readexactly(REPLY.size))
                if sizes[1] + sizes[3] > 2 * MAX_FILE_BYTES:  # code inside may have replaced the server
                    raise ValueError("it broke the protocol")
                streams = [(sizes[0], await reader.readexactly(sizes[1]))]
                streams.append((sizes[2], await reader.readexactly(sizes[3])))
                if (waiting := self._replies.get(number)) is not None and not waiting.done():
                    waiting.set_result((code, streams))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except ValueError as error:
            why = str(error)
        self.end(why)

    def end_after(self, seconds: float) -> None:
        """Ends the sandbox after `seconds`."""
        why = "its time is over (timeout_seconds)"
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end, why)

    def end(self, why: str) -> None:
        """Kills everything in the sandbox. Waiting calls fail with the reason."""
        if self.ended is None:
            self.ended = self._why_ended(why)
        if self._process is not None:
            self._process.kill()
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(self.ended)
                waiting.exception()  # retrieved here: a cancelled start does not wait for it any more

    def _why_ended(self, why: str) -> SandboxError | SandboxSetupError:
        ended = f"the sandbox {self.name!r} has ended"
        if not why and self._cgroup is not None and self._cgroup.ran_out_of_memory():
            return SandboxOOMError(f"{ended}: it ran out of memory (memory_mb)")
        if not why and self._process is not None and self._process.stderr is not None:
            os.set_blocking(self._process.stderr.fileno(), False)
            why = (self._process.stderr.read(2000) or b"").decode(errors="replace").strip()
        if 0 in self._replies and why.startswith("bwrap:"):  # it never ran
            is_old = re.search("(?i)unknown option", why)
            hint = TOO_OLD if is_old else NO_NAMESPACES if re.search("(?i)permi|namespace", why) else ""
            return SandboxSetupError(f"bubblewrap cannot make a sandbox here: {why}{hint}")
        return SandboxNotRunningError(f"{ended}: {why}" if why else f"{ended}: all of its processes were killed")

    async def destroy(self) -> None:
        """Ends the sandbox and waits until its processes are gone. Continues when cancelled."""
        self._ending = self._ending or asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._ending)

    async def _destroy(self) -> None:
        self.end("it was destroyed")
        if self._timer is not None:
            self._timer.cancel()  # it keeps a reference to this object
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
            if 0 in self._replies:  # bubblewrap may have been killed before it tied its child to itself
                await asyncio.to_thread(kill_marked, self.name.encode())
            assert self._process.stderr is not None
            self._process.stderr.close()
        if self._writer is not None:
            self._writer.close()  # ends a server that is not tied to bubblewrap yet
        if self._reading is not None:
            await asyncio.wait({self._reading})
        if self._cgroup is not None:
            await asyncio.to_thread(self._cgroup.remove)

    async def _call(self, *fields: bytes, seconds: float) -> tuple[int, list[tuple[int, bytes]]]:
        """Sends a request. Returns the exit code and the streams."""
        if self.ended is not None:
            raise self.ended
        assert self._writer is not None
        number = next(self._numbers)
        body = b"\0".join(fields)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(number.to_bytes(4, "big") + len(body).to_bytes(4, "big") + body)
            async with asyncio.timeout(seconds):
                await self._writer.drain()
                return await reply
        except TimeoutError:
            self.end(f"it did not answer within {seconds:g} s")
            raise SandboxNotRunningError(f"the sandbox {self.name!r} did not answer within {seconds:g} s") from None
        except ConnectionError:
            self.end("")
            raise self.ended or SandboxNotRunningError(self.name) from None
        except asyncio.CancelledError:
            if fields[0] == b"exec" and self.ended is None:
                stop = b"stop\0%d" % number
                self._writer.write(bytes(4) + len(stop).to_bytes(4, "big") + stop)
            raise
        finally:
            del self._replies[number]

    async def execute(self, command: str, seconds: float, folder: str) -> ExecResult:
        """Runs a command."""
        fields = (b"exec", str(seconds).encode(), os.fsencode(folder), command.encode(errors="surrogateescape"))
        if any(b"\0" in field for field in fields):
            raise UserError("a command of a sandbox must not have NUL characters")
        code, streams = await self._call(*fields, seconds=seconds + REPLY_SECONDS)
        output = [output_text(total, content) for total, content in streams]
        if code == exec_server.TIMED_OUT:
            raise SandboxCommandTimeoutError(command, seconds, self.name)
        return ExecResult(code, *output)

    async def file(self, kind: bytes, path: str, value: bytes) -> bytes:
        """Writes a file, reads one, or relays a socket."""
        if "\0" in path:
            raise UserError("a path of a sandbox must not have NUL characters")
        code, streams = await self._call(kind, os.fsencode(path), value, seconds=60 + REPLY_SECONDS)
        if code != 0:
            why = streams[1][1].decode(errors="replace")
            raise SandboxError(f"cannot {kind.decode()} {path!r} in sandbox {self.name!r}: {why}")
        return streams[0][1]


def _child(pid: int) -> int:
    """Returns the only child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def marked(word: bytes) -> list[tuple[int, str]]:
    """Returns process and id of each sandbox on this machine whose id or label is `word`."""
    marks = [(pid, value.split(b" ", 1)) for pid, value in values_of_variable(MARK_VARIABLE)]  # a label may have blanks
    return [(pid, words[0].decode()) for pid, words in marks if word in words]


def kill_marked(name: bytes) -> None:
    """Kills the sandbox with this id, whichever process created it."""
    for pid, _ in marked(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
