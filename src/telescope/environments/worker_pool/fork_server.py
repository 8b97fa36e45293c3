"""The process that environment workers are forked from.

Loading a tokenizer through transformers takes seconds of processor time and hundreds of MB, so it is done once, here,
and every worker, a replacement included, starts as a copy in milliseconds. No user code runs in this process and it
starts no threads, which is what makes forking it safe; environments are loaded by the workers.

It is the workers' parent: it ends when the driver does and they end when it does. A worker that has ended stays a
zombie until the driver says to bury it, so that its process id cannot become another's while the driver may signal it.

Messages are single packets of JSON: `fork` (with the worker's socket, slot and log as file descriptors) and `bury`
come in, `ready` or `failed`, `forked` and `ended` go out.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

import numpy as np

from telescope.environments.rendering import Renderer
from telescope.environments.worker_pool.messages import RendererSpec
from telescope.errors import UserError

_PR_SET_PDEATHSIG = 1
PACKET_BYTES = 65536


def die_with(parent: int) -> None:
    """Ask the kernel for a kill when the parent ends, which works whatever this process is doing."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before we asked


class ForkServer:
    """Forks on demand and reports deaths."""

    def __init__(self, connection: socket.socket, renderer: Renderer | None) -> None:
        self.connection = connection
        self.renderer = renderer
        self.reported: dict[int, bool] = {}
        """Children that are not buried: whether their end has been reported."""

    def serve(self) -> None:
        """Until the driver closes the connection."""
        waker, wakened = socket.socketpair()
        waker.setblocking(False)
        wakened.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno())
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            selector.register(wakened, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if wakened in ready:
                    wakened.recv(4096)
                    self._report_deaths()
                if self.connection in ready and not self._obey():
                    return

    def _send(self, message: dict[str, Any]) -> None:
        self.connection.send(json.dumps(message).encode())

    def _obey(self) -> bool:
        """Handle one packet; False when there will be no more."""
        packet, descriptors, _, _ = socket.recv_fds(self.connection, PACKET_BYTES, 3)
        if not packet:
            return False
        message = json.loads(packet)
        if "bury" in message:
            os.waitpid(message["bury"], 0)
            del self.reported[message["bury"]]
            return True
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(server, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self.reported[pid] = False
        self._send({"forked": message["fork"], "pid": pid})
        self._report_deaths()  # it may have died before it was in the table
        return True

    def _report_deaths(self) -> None:
        for pid, reported in list(self.reported.items()):
            if reported:
                continue
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                continue
            self.reported[pid] = True
            exited = end.si_code == os.CLD_EXITED
            self._send({"ended": pid, "code": end.si_status if exited else -end.si_status})

    def _become_worker(self, server: int, connection: int, slot: int, log: int) -> NoReturn:
        """Turn this copy into a worker; never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.connection.close()
            os.setsid()  # a group of its own: Ctrl-C is the driver's, and a kill reaches what user code started
            die_with(server)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            np.random.seed()  # the standard library does this by itself after a fork
            from telescope.environments.worker_pool.worker import run_worker

            run_worker(connection, slot, self.renderer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)  # not into the server's loop, and not held up by threads that user code left behind


def main(arguments: list[str]) -> None:
    """Entry of the process: `[socket descriptor, driver's process id, renderer as JSON]`."""
    descriptor, parent = int(arguments[0]), int(arguments[1])
    die_with(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the workers' too: they are copies
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    fields = json.loads(arguments[2])
    try:
        renderer = Renderer(RendererSpec(**fields)) if fields else None
    except Exception as error:
        user_error = isinstance(error, UserError)
        if not user_error:
            traceback.print_exc()
        text = str(error) if user_error else f"{type(error).__name__}: {error}"
        connection.send(json.dumps({"failed": text[:20_000], "user_error": user_error}).encode())
        return
    gc.collect()
    gc.freeze()  # what is loaded now stays in pages that the copies share
    server = ForkServer(connection, renderer)
    server._send({"ready": True})
    server.serve()
