"""Writes the checkpoints of a rank in a separate process while the rank trains.

    rank  --pipe: copied shards, in shared memory-->  writer  --collectives (gloo)-->  writers of the other ranks

The writers of all ranks form a separate process group, initialized through the ranks' store. Owns what runs in the
process; `checkpoint.BackgroundSaver` starts it. Invariants: a writer handles one request at a time and replies to each.
A writer whose group is broken exits, so that all ranks start new ones together.
"""

import datetime
import logging
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from telescope.utils.process import ignore_sigterm

GROUP_TIMEOUT = datetime.timedelta(minutes=30)
"""Limit for one collective of the writers. The slowest disk may take this much longer than the fastest."""


def write_checkpoints(pipe: Connection, address: tuple[str, int], generation: int, rank: int, world_size: int) -> None:
    """Writes the states and directories that come through the pipe, until the rank closes it or exits.

    Sends None, or why the files cannot be written. `address` is host and port of the ranks' store, `generation` numbers
    their groups.
    """
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
