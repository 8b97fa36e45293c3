"""Which request holds a worker's main thread, in memory that both processes see.

A worker that is stuck in user code cannot say so, and one that has died cannot say where. So before every step into
user code it writes the request's id to 16 shared bytes, and after the step a zero. The pool reads them to decide whose
deadline runs, and whom to hold responsible for a crash. Writing costs well under a microsecond.
"""

from __future__ import annotations

import mmap
import os

_BYTES = 16


class Slot:
    """`current` is the id of the request that holds the main thread (0: none); `entries` counts the entries."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _BYTES)
        self._view = memoryview(self._memory).cast("Q")

    @staticmethod
    def create() -> int:
        """A file descriptor for a new slot, to be inherited by the worker."""
        descriptor = os.memfd_create("telescope-slot")
        os.ftruncate(descriptor, _BYTES)
        return descriptor

    def enter(self, request_id: int) -> None:
        self._view[1] += 1
        self._view[0] = request_id

    def leave(self) -> None:
        self._view[0] = 0

    def read(self) -> tuple[int, int]:
        """`(current, entries)`."""
        return self._view[0], self._view[1]

    def close(self) -> None:
        self._view.release()
        self._memory.close()
