"""Samples numbers for the table `gauges`.

    read() every interval --> Sampler (a thread) --> Thinning --> bounded buffer --take()--> the writer of the record

Owns the time of each reading, the choice of readings to keep, and the handling of failed readings. The reading
functions are in `system_metrics` and `inference.engine_metrics`. Imports nothing heavy, because it
runs in every process.

Invariants: a sampler never blocks another thread. When the buffer is full, the oldest readings are dropped and counted.
A `read` that raises is reported once per type of error and tried again. Problems travel with the readings, so that they
appear in the log of the run.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

MAX_BUFFERED = 20_000
"""Readings in the buffer; at 100 per second, more than three minutes without a `take`."""

REPEAT_SECONDS = 10.0
"""Interval at which an unchanged number is repeated, so that a constant number differs from a missing one."""


@dataclass(slots=True, frozen=True)
class Reading:
    """One number. `labels` distinguish numbers with the same name: (("le", "0.5"),)."""

    time: float
    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    gpu: int | None = None
    """Index of the GPU that the number belongs to, as in `nvidia-smi`. None if it belongs to no GPU."""


@dataclass(slots=True, frozen=True)
class ReadingBatch:
    """Readings and problems since the last `take`, and the machine.

    `gpus` are the GPUs of the process, numbered as `nvidia-smi` numbers them on `node`. `hardware` is the machine's row
    of `nodes`.
    """

    readings: list[Reading]
    problems: list[str]
    node: str | None = None
    gpus: tuple[int, ...] = ()
    hardware: Mapping[str, object] | None = None


class Thinning:
    """Drops readings that lie on a straight line between their neighbors.

    Keeps the first and the last reading of a constant number, and one every `REPEAT_SECONDS`.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Reading] = {}
        self._left_out: dict[tuple[object, ...], Reading] = {}

    def __call__(self, readings: Iterable[Reading]) -> list[Reading]:
        """Returns the readings to keep, ordered by time within each series."""
        kept: list[Reading] = []
        for reading in readings:
            series = (reading.name, reading.labels, reading.gpu)
            last = self._kept.get(series)
            # The clock may have been set back.
            if last is not None and last.value == reading.value and abs(reading.time - last.time) < REPEAT_SECONDS:
                self._left_out[series] = reading
                continue
            before = self._left_out.pop(series, None)
            if before is not None and before.value != reading.value:
                kept.append(before)
            kept.append(reading)
            self._kept[series] = reading
        return kept


class Sampler:
    """Calls `read` every `interval` seconds in its own thread."""

    def __init__(self, name: str, interval: float, read: Callable[[], Iterable[Reading]]) -> None:
        self._interval = interval
        self._read = read
        self._thin = Thinning()
        self._lock = threading.Lock()
        self._buffer: deque[Reading] = deque(maxlen=MAX_BUFFERED)
        self._num_dropped = 0
        self._problems: list[str] = []
        self._reported: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"telescope-{name}", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take(self) -> ReadingBatch:
        """Returns the readings and problems since the last call."""
        with self._lock:
            batch = ReadingBatch(list(self._buffer), self._problems)
            self._buffer.clear()
            self._problems = []
            if self._num_dropped:
                batch.problems.append(f"{self._num_dropped} readings were dropped because the buffer was full")
                self._num_dropped = 0
        return batch

    def stop(self, timeout: float = 2.0) -> None:
        """Stops the thread. A thread that hangs in a reading ends with its process."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def sample(self) -> None:
        """Reads once. Keeps what `read` yields before it raises."""
        found: list[Reading] = []
        try:
            found.extend(self._read())
        except Exception as error:  # Sampling must not end the process, whatever a driver raises.
            if (kind := type(error).__name__) not in self._reported:
                self._reported.add(kind)
                with self._lock:
                    self._problems.append(f"cannot be read: {error!r}. It is tried again; this error is reported once")
        readings = self._thin(found)
        with self._lock:
            self._num_dropped += max(0, len(self._buffer) + len(readings) - MAX_BUFFERED)
            self._buffer.extend(readings)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping.is_set():
            self.sample()
            # Missed readings are skipped.
            due = max(due + self._interval, time.monotonic())
            self._stopping.wait(due - time.monotonic())
