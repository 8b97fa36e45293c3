"""Numbers that are sampled at intervals, on their way from where they are read to the table `gauges`.

    read() every interval --> Sampler (a thread) --> Thinned --> bounded buffer --take()--> whoever writes the record

Owns when numbers are read, what of them is kept, and what happens when reading fails. Does not own what is read: that
is `host`, `nvidia`, `trainer.memory` and `inference.engine_metrics`. Imports nothing heavy: it runs in every process.

Invariants: nobody waits for a sampler, and it waits for nobody; what does not fit the buffer is dropped, the oldest
first, and counted; a `read` that raises costs a sentence, once for each kind of error, and is tried again. What went
wrong travels with the readings, so that it is said where people look, in the run's own log.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_WAITING = 20_000
"""Readings that wait to be taken; at a hundred a second more than three minutes of a driver that does not ask."""

REPEAT_SECONDS = 10.0
"""A number that stays the same is written this often, so that one which stands still is told from one that ended."""


@dataclass(slots=True, frozen=True)
class Reading:
    """One number. `labels` tell apart what has one name: (("le", "0.5"),)."""

    time: float
    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    gpu: int | None = None
    """Index of the GPU on its machine, as `nvidia-smi` counts; None for what is not of one."""


@dataclass(slots=True, frozen=True)
class Taken:
    """What was read since it was last asked for, what went wrong meanwhile, in sentences, and where that was.

    `gpus` are those that the process was given, as `nvidia-smi` counts on `node`.
    """

    readings: list[Reading]
    problems: list[str]
    node: str | None = None
    gpus: tuple[int, ...] = ()


class Thinned:
    """Leaves out readings that a straight line between their neighbours shows as well.

    Of a number that stays the same, the first and the last reading are kept, and one every `REPEAT_SECONDS`.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Reading] = {}
        self._left_out: dict[tuple[object, ...], Reading] = {}

    def __call__(self, readings: Iterable[Reading]) -> list[Reading]:
        """The readings to keep, by series in the order of time."""
        kept: list[Reading] = []
        for reading in readings:
            series = (reading.name, reading.labels, reading.gpu)
            last = self._kept.get(series)
            if last is not None and last.value == reading.value and reading.time - last.time < REPEAT_SECONDS:
                self._left_out[series] = reading
                continue
            before = self._left_out.pop(series, None)
            if before is not None and before.value != reading.value:
                kept.append(before)
            kept.append(reading)
            self._kept[series] = reading
        return kept


class Sampler:
    """Calls `read` every `interval` seconds in a thread of its own, from `start` to `stop`."""

    def __init__(self, name: str, interval: float, read: Callable[[], Iterable[Reading]]) -> None:
        self._name = name
        self._interval = interval
        self._read = read
        self._thin = Thinned()
        self._lock = threading.Lock()
        self._waiting: deque[Reading] = deque(maxlen=MAX_WAITING)
        self._num_dropped = 0
        self._problems: list[str] = []
        self._said: set[str] = set()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin. Calling it again changes nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"telescope-{self._name}", daemon=True)
            self._thread.start()

    def take(self) -> Taken:
        """What was read since the last call."""
        with self._lock:
            taken = Taken(list(self._waiting), self._problems)
            self._waiting.clear()
            self._problems = []
            if self._num_dropped:
                taken.problems.append(f"{self._num_dropped} readings were dropped, since nobody took them for long")
                self._num_dropped = 0
        return taken

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread; one that hangs in a read is left to end with its process."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def sample(self) -> None:
        """Read once, now."""
        try:
            readings = self._thin(self._read())
        except Exception as error:  # whatever it is, observing must not end what is observed
            self._note(error)
            return
        with self._lock:
            self._num_dropped += max(0, len(self._waiting) + len(readings) - MAX_WAITING)
            self._waiting.extend(readings)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping.is_set():
            self.sample()
            # Readings that were missed, by a process that stood still, are not made up for.
            due = max(due + self._interval, time.monotonic())
            self._stopping.wait(due - time.monotonic())

    def _note(self, error: Exception) -> None:
        if (kind := type(error).__name__) in self._said:
            return
        self._said.add(kind)
        with self._lock:
            self._problems.append(f"cannot be read: {error!r}; trying on, without saying so again")
