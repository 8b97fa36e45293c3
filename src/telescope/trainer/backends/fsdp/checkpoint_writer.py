"""Writes the checkpoints of a rank in a separate process while the rank trains.

    rank  --pipe: copied shards, in shared memory-->  writer  --collectives (gloo)-->  writers of the other ranks

The writers of all ranks form a separate process group, initialized through the ranks' store. Owns the process and its
group, not the format (`checkpoint`). Invariants: a writer handles one request at a time and replies to each. A writer
whose group is broken exits, so that all ranks start new ones together (`CheckpointWriter.is_alive`).
"""

import datetime
import logging
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing

from telescope.utils.process import ignore_sigterm

GROUP_TIMEOUT = datetime.timedelta(minutes=30)
"""Limit for one collective of the writers. The slowest disk may take this much longer than the fastest."""

STOP_SECONDS = 5.0

START_METHOD = "spawn"
"""A fork would copy the rank's locks and CUDA context, which do not work in another process."""


class CheckpointWriter:
    """The writer of one rank. It starts in the background, so only the first request waits for it."""

    def __init__(self, store: tuple[str, int], generation: int, rank: int, world_size: int) -> None:
        """Starts the process. `store` is host and port of the ranks' store, `generation` numbers their groups."""
        context: Any = torch.multiprocessing.get_context(START_METHOD)  # the name of the method determines its type
        self._pipe, child = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child, store, generation, rank, world_size), name=f"checkpoints {rank}", daemon=True
        )
        self._process.start()
        child.close()  # so that `receive` ends when the process ends

    @property
    def is_alive(self) -> bool:
        """Returns whether the process runs. False once its group is broken."""
        return self._process.is_alive()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def begin(self, state: dict[str, Any], directory: Path) -> None:
        """Starts to write `state`. Its tensors are in shared memory and must not change before `wait` returns."""
        self._pipe.send((state, directory))

    def wait(self) -> None:
        """Waits until the files are on disk. Raises `OSError` if they cannot be written."""
        try:
            problem = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(STOP_SECONDS)
            code = self._process.exitcode
            raise OSError(f"the process that writes checkpoints has ended with exit code {code}") from error
        if problem is not None:
            raise OSError(problem)

    def stop(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.kill()
        self._process.join(STOP_SECONDS)


def _serve(pipe: Connection, address: tuple[str, int], generation: int, rank: int, world_size: int) -> None:
    """Runs the writing process until the rank closes the pipe or exits."""
    ignore_sigterm()
    # torch's writer would otherwise open a context on the rank's GPU, which may be full.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    threading.Thread(target=_exit_with_the_rank, daemon=True).start()
    logging.disable(logging.INFO)  # torch would log every request to the terminal
    host, port = address
    name = f"checkpoint writers {generation}/"
    try:
        store = dist.PrefixStore(name, dist.TCPStore(host, port, timeout=GROUP_TIMEOUT))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
    except RuntimeError:  # a rank has exited, which the driver reports
        return
    while True:
        try:
            state, directory = pipe.recv()
        except (EOFError, OSError):  # the rank has exited, perhaps before its tensors were received
            return
        try:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(directory))
        except dcp.CheckpointException as error:
            pipe.send("; ".join(sorted({str(failure[0]) for failure in error.failures.values()})))
        except RuntimeError as error:  # from a collective: another writer has exited
            pipe.send(f"another rank's writer failed: {error}")
            return
        else:
            pipe.send(None)
        del state


def _exit_with_the_rank() -> None:
    """Exits when the rank has exited, before its folder is used again."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(1)
