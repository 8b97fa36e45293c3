"""Runs commands inside a sandbox. `sandbox.local` passes this file, compiled, to a Python interpreter there.

It has one thread and few imports, because imports delay the start of a sandbox. It is process 1 of the sandbox, which
`kill -9 -1` inside does not reach. When its inherited socket closes, it exits, which ends every process of the sandbox.

A request is a frame (request number and length, 4 bytes each) with fields separated by NUL: `exec`, time limit, folder,
command; `stop`, number of the command; `write`, path, content; `read`, path, maximum size; `relay`, socket
path, port.
A reply is the number, the exit code (signed; `FAILED`, `TIMED_OUT`), for each of two streams its full length and the
length that follows (8 bytes each), then the streams. The middle of a long stream is left out.
"""

import posix  # not os: its import takes a tenth of the start time
import select
import sys
import time
from resource import RLIM_INFINITY, RLIMIT_CORE, RLIMIT_DATA, RLIMIT_NOFILE, RLIMIT_NPROC, getrlimit, setrlimit

FAILED, TIMED_OUT = -1, -2
CANNOT_RUN = 126  # the exit code of shells for a command that they cannot start
SIGKILL = 9  # importing the module signal takes some milliseconds
LONGEST_ARGUMENT = 100_000  # in bytes; the kernel's limit is 128 KiB
PIECE = 65536
PIECES = 16  # as much as the largest pipe of a user holds
MARK = b"TELESCOPE_COMMAND="
LONGEST_WAIT_MS = 1000  # while commands run, orphans are reaped this often


class Stream:
    """Buffers one output stream of a command, at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.read_end, self.write_end = posix.pipe()
        posix.set_blocking(self.read_end, False)
        self.half, self.total, self.head, self.tail = limit // 2, 0, b"", b""

    def drain(self) -> bool:
        """Reads what is available, within limits. Returns whether the end was reached."""
        for _ in range(PIECES):  # the writer may be faster
            try:
                piece = posix.read(self.read_end, PIECE)
            except BlockingIOError:
                return False
            if not piece:
                return True
            self.total += len(piece)
            room = self.half - len(self.head)
            self.head += piece[:room]
            self.tail = (self.tail + piece[room:])[-self.half :] if self.half else b""
        return False


class Command:
    """A running command: its process, its streams and its deadline."""

    def __init__(self, server: "Server", number: int, seconds: float, folder: bytes, command: bytes) -> None:
        self.number, self.deadline, self.timed_out = number, time.monotonic() + seconds, False
        self.mark = MARK + b"%d" % number
        self.streams = [Stream(server.output_limit), Stream(server.output_limit)]
        script = [b"-c", command]
        if len(command) > LONGEST_ARGUMENT:
            memory = posix.memfd_create("command", 0)
            with open(memory, "wb", closefd=False) as file:
                file.write(command)
            script = [b"/proc/self/fd/%d" % memory]
        shell = next(shell for shell in (b"/bin/bash", b"/bin/sh") if posix.access(shell, posix.X_OK))
        try:
            self.pid = posix.fork()
        except OSError:
            self.pid = -1
        if self.pid == 0:
            try:
                posix.setsid()
                posix.dup2(posix.open("/dev/null", posix.O_RDONLY), 0)
                for descriptor, stream in enumerate(self.streams, 1):
                    posix.dup2(stream.write_end, descriptor)
                posix.chdir(folder)
                environment = dict(v.split(b"=", 1) for v in [*server.environment, self.mark])
                posix.execve(shell, [shell, *script], environment)
            except OSError as error:
                posix.write(2, f"{error}\n".encode(errors="surrogateescape"))
            finally:
                posix._exit(CANNOT_RUN)
        for stream in self.streams:
            posix.close(stream.write_end)
        if len(script) == 1:
            posix.close(memory)
        if self.pid < 0:
            for stream in self.streams:
                posix.close(stream.read_end)
            raise OSError("the sandbox has reached its limit of processes (max_processes)")
        self.process = posix.pidfd_open(self.pid)

    def kill(self, children: set[int]) -> None:
        """Kills the command and every process that it started, also outside its session.

        An orphan that hid its mark counts as the command's if it started later than the command. `children` are
        children of this process that are no orphans.
        """
        for _ in range(50):  # repeats, because one may fork while the others are killed
            tree = {self.pid}
            members = []
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                began = int(file.read().rpartition(b")")[2].split()[19])
            for pid in sorted(int(name) for name in posix.listdir("/proc") if name.isdigit()):
                try:
                    with open(f"/proc/{pid}/stat", "rb") as file:
                        fields = file.read().rpartition(b")")[2].split()
                except OSError:  # it has ended
                    continue
                if fields[0] == b"Z" or pid == 1 or pid in children - {self.pid}:
                    continue
                try:
                    with open(f"/proc/{pid}/environ", "rb") as file:
                        variables = file.read().split(b"\0")
                except OSError:  # it has ended, or may not be looked at
                    variables = []
                is_hidden = not any(variable.startswith(MARK) for variable in variables)
                is_mine = is_hidden and fields[1] == b"1" and int(fields[19]) >= began
                if is_mine or self.mark in variables or pid in tree or int(fields[1]) in tree:
                    tree.add(pid)
                    members.append(pid)
            for pid in members:
                try:  # noqa: SIM105 (contextlib costs a start some milliseconds)
                    posix.kill(pid, SIGKILL)
                except OSError:
                    pass
            if not members:
                return
            time.sleep(0.005)


class Server:
    """Serves requests from the socket until it closes."""

    def __init__(self, descriptor: int, output_limit: int, environment: list[bytes]) -> None:
        self.descriptor, self.output_limit, self.environment = descriptor, output_limit, environment
        self.poll = select.poll()
        self.poll.register(descriptor, select.POLLIN)
        self.commands: dict[int, Command] = {}  # by file descriptor of the process
        self.statuses: dict[int, int] = {}  # of shells that `reap` found, by process
        self.streams: dict[int, Stream] = {}  # by file descriptor, daemons included
        self.relays: set[int] = set()

    def receive(self, length: int) -> bytes:
        """Reads `length` bytes from the socket. Exits at its end."""
        pieces = []
        while length:
            piece = posix.read(self.descriptor, min(length, 1 << 20))
            if not piece:
                posix._exit(0)
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)

    def reply(self, number: int, code: int, *streams: tuple[int, bytes]) -> None:
        """Sends a reply. Each stream is (full length, bytes)."""
        head = number.to_bytes(4, "big") + code.to_bytes(4, "big", signed=True)
        for total, content in streams:
            head += total.to_bytes(8, "big") + len(content).to_bytes(4, "big")
        data = memoryview(head + b"".join(content for _, content in streams))
        while data:
            data = data[posix.write(self.descriptor, data) :]

    def request(self) -> None:
        """Handles one request."""
        number, length = (int.from_bytes(self.receive(4), "big") for _ in range(2))
        kind, body = self.receive(length).split(b"\0", 1)
        try:
            if kind == b"exec":
                seconds, folder, text = body.split(b"\0")
                command = Command(self, number, float(seconds), folder, text)
                self.commands[command.process] = command
                self.poll.register(command.process, select.POLLIN)
                for stream in command.streams:
                    self.streams[stream.read_end] = stream
                    self.poll.register(stream.read_end, select.POLLIN)
            elif kind == b"stop":
                for command in self.commands.values():
                    if command.number == int(body):
                        command.kill(self.children())
            elif kind == b"write":
                path, content = body.split(b"\0", 1)
                for end, character in enumerate(path[1:], 1):
                    if character == ord("/"):
                        try:  # noqa: SIM105
                            posix.mkdir(path[:end])
                        except FileExistsError:
                            pass
                flags = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_NONBLOCK  # a named pipe must not block
                with open(posix.open(path, flags, 0o666), "wb") as file:
                    file.write(content)
                self.reply(number, 0, (0, b""), (0, b""))
            elif kind == b"read":
                path, limit = body.split(b"\0")
                with open(path, "rb", opener=lambda path, flags: posix.open(path, flags | posix.O_NONBLOCK)) as file:
                    content = file.read(int(limit) + 1) or b""
                if len(content) > int(limit):
                    raise OSError(f"it has more than {int(limit)} bytes")
                self.reply(number, 0, (len(content), content), (0, b""))
            elif kind == b"relay":
                path, port = body.split(b"\0")
                self.relays.add(relay(path, int(port), self.descriptor))
                self.reply(number, 0, (0, b""), (0, b""))
        except OSError as error:
            message = str(error).encode(errors="surrogateescape")
            # Earlier commands may have used up a limit: that is a command that fails, not a sandbox.
            self.reply(number, CANNOT_RUN if kind == b"exec" else FAILED, (0, b""), (len(message), message))

    def children(self) -> set[int]:
        """Returns the children of this process that are no orphans: relays, and the shells of all commands."""
        return self.relays | {command.pid for command in self.commands.values()}

    def reap(self) -> None:
        """Reaps orphans, which are children of process 1. Keeps the status of shells for `ended`."""
        try:
            while (found := posix.waitpid(-1, posix.WNOHANG))[0]:
                self.relays.discard(found[0])
                if found[0] in self.children():
                    self.statuses[found[0]] = found[1]
        except ChildProcessError:
            pass

    def ended(self, command: Command) -> None:
        """Replies once a command's shell has exited. Later output of its daemons is read and dropped."""
        status = self.statuses.pop(command.pid, None)
        if status is None:
            _, status = posix.waitpid(command.pid, 0)
        self.poll.unregister(command.process)
        posix.close(command.process)
        del self.commands[command.process]
        for stream in command.streams:
            if stream.read_end in self.streams:
                self.drain(stream)
        code = TIMED_OUT if command.timed_out else posix.waitstatus_to_exitcode(status)
        code = 128 - code if code < 0 and not command.timed_out else code
        self.reply(command.number, code, *((s.total, s.head + s.tail) for s in command.streams))
        for stream in command.streams:
            stream.half, stream.head, stream.tail = 0, b"", b""

    def drain(self, stream: Stream) -> None:
        if stream.drain():
            self.poll.unregister(stream.read_end)
            posix.close(stream.read_end)
            del self.streams[stream.read_end]

    def run(self) -> None:
        """Serves until the socket closes."""
        while True:
            self.reap()
            now = time.monotonic()
            waits = [command.deadline - now for command in self.commands.values() if not command.timed_out]
            wait = min(max(0, min(waits)) * 1000 + 1, LONGEST_WAIT_MS) if waits else None
            for descriptor, _ in reversed(self.poll.poll(wait)):  # the request last: it may stop what has ended
                if descriptor == self.descriptor:
                    self.request()
                elif descriptor in self.commands:
                    self.ended(self.commands[descriptor])
                elif descriptor in self.streams:
                    self.drain(self.streams[descriptor])
            for command in self.commands.values():
                if not command.timed_out and time.monotonic() >= command.deadline:
                    command.timed_out = True
                    command.kill(self.children())


def relay(path: bytes, port: int, descriptor: int) -> int:
    """Starts a process that relays a port of the sandbox to a Unix socket of the host. Returns its id."""
    import _socket  # imported here because only sandboxes with an endpoint need it
    import _thread

    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    if child := posix.fork():
        listener.close()
        return child

    def copy(source: _socket.socket, target: _socket.socket) -> None:
        try:
            while piece := source.recv(PIECE):
                target.sendall(piece)
            target.shutdown(_socket.SHUT_WR)
        except OSError:  # one side has closed
            for each in (source, target):
                try:  # noqa: SIM105
                    each.shutdown(_socket.SHUT_RDWR)
                except OSError:
                    pass

    try:
        posix.close(descriptor)
        _thread.stack_size(2**18)
        while True:
            client = _socket.socket(fileno=listener._accept()[0])  # type: ignore[attr-defined]
            host = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            try:
                host.connect(path)
                _thread.start_new_thread(copy, (client, host))
                _thread.start_new_thread(copy, (host, client))
            except (OSError, RuntimeError):  # the endpoint has ended, or memory is exhausted
                client.close()
    finally:
        posix._exit(1)  # never back into the server


def main(socket: str, output_limit: str, num_processes: str, data_bytes: str) -> None:
    """Sets up the sandbox from inside, reports that it is ready, and serves. A limit of 0 means no limit."""
    descriptor = int(socket)
    posix.set_inheritable(descriptor, False)
    posix.umask(0o022)
    for path, text in (
        ("/etc/passwd", "sandbox:x:1000:1000::/workspace:/bin/sh\n"),
        ("/etc/group", "sandbox:x:1000:\n"),
        ("/etc/hosts", "127.0.0.1 localhost\n"),
    ):
        with open(path, "w") as file:
            file.write(text)
    limits = {RLIMIT_CORE: 0, RLIMIT_NOFILE: 4096, RLIMIT_NPROC: int(num_processes), RLIMIT_DATA: int(data_bytes)}
    for kind, limit in limits.items():
        most = getrlimit(kind)[1]
        if limit or kind == RLIMIT_CORE:
            setrlimit(kind, (limit, limit) if most == RLIM_INFINITY else (min(limit, most),) * 2)
    server = Server(descriptor, int(output_limit), [b"%s=%s" % item for item in posix.environ.items()])
    server.reply(0, 0, (0, b""), (0, b""))
    server.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
