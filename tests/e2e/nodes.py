"""Ray nodes on this machine that are as separate as machines.

Each has a network namespace, where its loopback address is its own, and a folder of its own where Ray keeps its files.
Needs root and iproute2.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import psutil

PORT = 6379
START_SECONDS = 120


class Nodes:
    """A cluster of nodes, of which the first is the head."""

    def __init__(self, count: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="n-", dir="/tmp"))  # Ray's sockets want short paths
        (self._folder / "ray").mkdir()
        self._names = [f"{self._folder.name}-{index}" for index in range(count)]
        self._switch = f"{self._folder.name}-s"
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        for index, name in enumerate(self._names):
            ip("netns", "add", name)
            ip(*f"-n {name} link add wire type veth peer name wire{index} netns {self._switch}".split())
            ip(*f"-n {self._switch} link set wire{index} master bridge up".split())
            ip(*f"-n {name} addr add {self.address(index)}/24 dev wire".split())
            ip(*f"-n {name} link set lo up".split())

    def __enter__(self) -> Nodes:
        for index in range(len(self._names)):
            self.start(index)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for index, name in enumerate(self._names):
            self.lose(index)
            ip("netns", "del", name)
        ip("netns", "del", self._switch)
        shutil.rmtree(self._folder)

    @property
    def ray_address(self) -> str:
        return f"{self.address(0)}:{PORT}"

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def within(self, index: int) -> list[str]:
        """The words before a command that runs on a node. Ranks of other tests in this process chose loopback."""
        return ["ip", "netns", "exec", self._names[index], "env", "-u", "GLOO_SOCKET_IFNAME"]

    def start(self, index: int) -> None:
        """Starts a node, also one that was lost, and waits for Ray."""
        ip("-n", self._names[index], "link", "set", "wire", "up")
        shared, own = self._folder / "ray", Path(tempfile.mkdtemp(dir=self._folder))
        where = f"--head --port {PORT} --temp-dir {shared}" if index == 0 else f"--address {self.ray_address}"
        command = [str(Path(sys.executable).with_name("ray")), "start", *where.split(), "--block"]
        command += [f"--node-ip-address={self.address(index)}", "--num-cpus=2", "--object-store-memory=80000000"]
        if index:
            command = ["sh", "-c", f'mount --bind {own} {shared}; exec "$@"', "sh", *command]
        log = self._folder / f"{index}.log"
        with log.open("w") as output:
            subprocess.Popen([*self.within(index), *command], stdout=output, stderr=output, start_new_session=True)
        deadline = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)

    def lose(self, index: int) -> None:
        """Switches a node off: its processes are gone at once, and its network with them."""
        ip("-n", self._names[index], "link", "set", "wire", "down")
        while processes := self._processes(index):
            for process in processes:
                process.send_signal(signal.SIGKILL)
            psutil.wait_procs(processes, timeout=10)

    def titles(self, index: int) -> str:
        """The command lines of a node's processes."""
        return "\n".join(" ".join(process.cmdline()) for process in self._processes(index))

    def _processes(self, index: int) -> list[psutil.Process]:
        pids = map(int, ip("netns", "pids", self._names[index]).split())
        alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
