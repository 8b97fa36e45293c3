"""The fork server: the process that environment workers are forked from.

It loads the tokenizer once, which takes seconds and hundreds of MB where only transformers can read it, and every
worker, a replacement included, starts as a copy in milliseconds. This process runs no user code and starts no
threads, so it can be forked safely; the workers load the environments.

It ends when the driver ends, and its workers end when it ends. It adopts processes that user code started and that left
their worker's process group (a double fork), and kills them when the driver closes the connection. A worker that has
ended stays a zombie until the driver sends `reap`, so that its process id is not reused while the driver may signal it.

Messages are single packets of JSON. Received: `fork` (with the worker's socket, slot and log as file descriptors) and
`reap`. Sent: `ready` or `failed`, `forked` and `ended`.
"""

from __future__ import annotations

import contextlib
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
import psutil

from telescope.errors import UserError
from telescope.rollout.rendering import Renderer, RendererSpec
from telescope.utils.child_guard import end_with_parent
from telescope.utils.process import ignore_sigterm

PACKET_BYTES = 65536
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """Forks workers on request and reports their ends."""

    def __init__(self, connection: socket.socket, renderer: Renderer | None) -> None:
        self.connection = connection
        self.renderer = renderer
        self.reported: dict[int, bool] = {}
        """Workers that are not reaped: whether their end has been reported."""

    def serve(self) -> None:
        """Serves until the driver closes the connection, then kills and reaps all children."""
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
                    self._report_ends()
                if self.connection in ready and not self._handle_packet():
                    break
        while children := psutil.Process().children():  # and the descendants that they leave
            for child in children:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)

    def _send(self, message: dict[str, Any]) -> None:
        self.connection.send(json.dumps(message).encode())

    def _handle_packet(self) -> bool:
        """Handles one packet. Returns False at the end of the stream."""
        packet, descriptors, _, _ = socket.recv_fds(self.connection, PACKET_BYTES, 3)
        if not packet:
            return False
        message = json.loads(packet)
        if "reap" in message:
            os.waitpid(message["reap"], 0)
            del self.reported[message["reap"]]
            self._reap_orphans()
            return True
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(server, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self.reported[pid] = False
        self._send({"forked": message["fork"], "pid": pid})
        self._report_ends()  # it may have ended before it was in the table
        return True

    def _report_ends(self) -> None:
        for pid, reported in list(self.reported.items()):
            if reported:
                continue
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                continue
            self.reported[pid] = True
            exited = end.si_code == os.CLD_EXITED
            self._send({"ended": pid, "code": end.si_status if exited else -end.si_status})
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        """Reaps ended adopted processes, up to the next ended worker."""
        with contextlib.suppress(ChildProcessError):  # there is no child at all
            while (end := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if end.si_pid in self.reported:
                    return
                os.waitpid(end.si_pid, 0)

    def _become_worker(self, server: int, connection: int, slot: int, log: int) -> NoReturn:
        """Turns this forked copy into a worker; never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.connection.close()
            os.setsid()  # its own group: Ctrl-C reaches only the driver, a kill also reaches processes of user code
            end_with_parent(server)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            np.random.seed()  # the standard library's generator is reseeded automatically
            from telescope.rollout.worker_pool.worker import run_worker

            run_worker(connection, slot, self.renderer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)  # does not return into the server's loop or wait for threads of user code


def main(arguments: list[str]) -> None:
    """Entry point. Arguments: socket descriptor, driver's process id, renderer as JSON."""
    descriptor, parent = int(arguments[0]), int(arguments[1])
    end_with_parent(parent)
    ignore_sigterm()  # workers inherit this
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # workers inherit this
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
    gc.freeze()  # keeps loaded objects in pages that the copies share
    server = ForkServer(connection, renderer)
    server._send({"ready": True})
    server.serve()
