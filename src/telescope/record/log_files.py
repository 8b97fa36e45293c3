"""Copies the lines of a run's log files into the table `logs`.

Trainer ranks, servers and environments write plain files below `logs/`, so that the last lines before a crash are kept.
`LogFiles` reads what they append, in one thread of the driver; `LogParser` splits it into entries. The driver's own
lines reach the record through `logging`.

Invariants: a traceback is one entry, whichever library wrote it. An entry has no control sequences. Memory per file is
bounded: if a file grows faster than it is read, a part is skipped, and an entry states how many bytes.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from telescope.record.files import RunFiles
from telescope.utils.text import plain

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Interval between reads, short enough for a person who follows the logs."""

MAX_BYTES_PER_POLL = 2**20
"""Bytes of one file that are read at once, which takes 10 ms."""

MAX_BEHIND_BYTES = 8 * MAX_BYTES_PER_POLL
"""If a file has more unread bytes, all but its last `MAX_BYTES_PER_POLL` are skipped."""

MAX_LINE = 16 * 1024
"""Characters of a line that are kept."""

MAX_ENTRY = 256 * 1024
"""Characters of an entry. A longer entry is cut."""

PLAUSIBLE_SECONDS = 600.0
"""If the time of a line differs more from this machine's clock, it has another time zone and is not used."""

OWN = "driver.log"
"""The driver's log file. The table already contains its lines."""

_PREFIX = re.compile(r"\([\w-]+ pid=(\d{1,9})\) ")
"""Prefix that vLLM adds to each line of its processes."""

_HEADERS = (
    # Telescope, see `logging._FORMAT`.
    re.compile(
        r"(?P<utc>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z (?P<level>[A-Z]+) +(?P<process>\d{1,9}) (?P<place>\S+:\d+) ?"
        r"(?P<message>.*)"
    ),
    # vLLM.
    re.compile(
        r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<local>\d\d-\d\d \d\d:\d\d:\d\d) \[(?P<place>[^\]]+:\d+)\] ?"
        r"(?P<message>.*)"
    ),
    # uvicorn, and `logging.basicConfig`.
    re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):\s+(?P<message>.*)"),
    # torch and its C++ parts.
    re.compile(r"\[?(?P<letter>[IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ (?:\d+ )?(?P<place>[^\]\s]+:\d+)\] ?(?P<message>.*)"),
)
_LETTERS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_WARNING = re.compile(r":\d+: \w*Warning: ")
_ERROR = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception)\b(?::|$)|Fatal Python error")


@dataclass(slots=True)
class _Entry:
    """An entry that may continue. `header` is what all its lines have in common, or None."""

    time: float
    level: str
    process: int | None
    place: str | None
    lines: list[str]
    header: tuple[Any, ...] | None = None
    in_traceback: bool = False
    size: int = 0
    has_traceback: bool = False

    def __post_init__(self) -> None:
        self.has_traceback = _TRACEBACK in self.lines[0]


@dataclass
class LogParser:
    """Splits the lines of one file into entries, which are rows of `logs` without component and source."""

    _entry: _Entry | None = None

    def feed(self, line: str, now: float) -> Iterator[dict[str, Any]]:
        """Takes one line, read at `now`. Yields the entry that it ends, if any."""
        line = plain(line.removesuffix("\r").rsplit("\r", 1)[-1])
        prefix = _PREFIX.match(line)
        process = int(prefix[1]) if prefix else None
        line = line[prefix.end() :] if prefix else line
        match = next((found for header in _HEADERS if (found := header.match(line))), None)
        if match is not None:
            started = _started(match.groupdict(), process, now)
            if started.header is not None and self._entry is not None and self._entry.header == started.header:
                self._append(started.lines[0])
                return
            yield from self.end()
            self._entry = started
        elif self._continues(line):
            self._append(line)
        elif line.strip():
            yield from self.end()
            is_error = line.startswith(_TRACEBACK) or _ERROR.match(line)
            level = "ERROR" if is_error else "WARNING" if _WARNING.search(line) else "INFO"
            self._entry = _Entry(now, level, process, None, [line], in_traceback=line.startswith(_TRACEBACK))

    def end(self) -> Iterator[dict[str, Any]]:
        """Yields the last entry, because no line has followed for a while."""
        entry, self._entry = self._entry, None
        if entry is not None and any(line.strip() for line in entry.lines):
            known = {name: getattr(entry, name) for name in ("time", "level", "process", "place")}
            yield known | {"message": "\n".join(entry.lines).strip("\n")}

    def _continues(self, line: str) -> bool:
        """Returns whether a line continues the entry before it. The line has no header."""
        entry = self._entry
        if entry is None:
            return False
        if line.startswith(_TRACEBACK):  # after the message of `logger.exception`, or a chained one
            belongs = entry.level in ("ERROR", "CRITICAL")
            entry.in_traceback = belongs
            return belongs
        if entry.in_traceback:
            # The first line without indentation names the exception.
            entry.in_traceback = not line.strip() or line[0] == " "
            return True
        return line[:1] == " " or (entry.has_traceback and (not line.strip() or line.startswith(_CHAINED)))

    def _append(self, line: str) -> None:
        assert self._entry is not None
        if self._entry.size < MAX_ENTRY:
            self._entry.lines.append(line)
            self._entry.size += len(line)
            self._entry.has_traceback |= _TRACEBACK in line


def _started(values: dict[str, str | None], process: int | None, now: float) -> _Entry:
    """Returns a new entry for a line with a header."""
    at = now
    with suppress(ValueError):  # the output of any program may look like a header, with the day before the month
        if utc := values.get("utc"):
            at = datetime.fromisoformat(utc).replace(tzinfo=UTC).timestamp()
        elif local := values.get("local"):
            year = datetime.fromtimestamp(now).year
            at = datetime.strptime(f"{year}-{local}", "%Y-%m-%d %H:%M:%S").timestamp()
    if abs(at - now) > PLAUSIBLE_SECONDS:
        at = now
    level = values.get("level") or _LETTERS[values.get("letter") or "I"]
    pid = values.get("process")
    process = int(pid) if pid else process
    place, message = values.get("place"), values.get("message") or ""
    header = (level, values.get("utc") or values.get("local"), process, place) if place else None
    return _Entry(at, level, process, place, [message], header, message.startswith(_TRACEBACK))


@dataclass
class _File:
    path: Path
    position: int
    parser: LogParser = field(default_factory=LogParser)
    partial: bytes = b""


class LogFiles:
    """Reads the log files of a run until it is closed. Use it as a context manager, inside the recorder's.

    Skips what the files contain at the start, because an earlier attempt has recorded it. `write` is `Recorder.write`.
    """

    def __init__(self, run_dir: Path, write: Callable[[str, dict[str, Any]], None]) -> None:
        self._folder = RunFiles(run_dir).logs
        self._write = write
        self._files = {path: _File(path, path.stat().st_size) for path in self._paths()}
        self._closing = threading.Event()
        self._unreadable: set[Path] = set()
        self._thread = threading.Thread(target=self._run, name="telescope-log-files", daemon=True)

    def __enter__(self) -> LogFiles:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._thread.join(10.0)  # a disk that does not respond must not delay the end of a run for long

    def poll(self, now: float, *, last: bool = False) -> None:
        """Reads new lines. With `last`, also writes entries that may be incomplete."""
        for path in self._paths():
            file = self._files.setdefault(path, _File(path, 0))
            try:
                for row in self._new_entries(file, now, last):
                    self._write("logs", {"component": path.stem, "source": path.name, **row})
            except OSError as error:
                self._warn_once(path, error)

    def _paths(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("*.log") if path.name != OWN and path.is_file())

    def _run(self) -> None:
        while True:
            closing = self._closing.wait(POLL_SECONDS)
            try:
                self.poll(time.time(), last=closing)
            except OSError as error:
                self._warn_once(self._folder, error)
            if closing:
                return

    def _warn_once(self, path: Path, error: OSError) -> None:
        if path not in self._unreadable:
            self._unreadable.add(path)
            logger.warning("The log lines in %s cannot be read: %s", path, error)

    def _new_entries(self, file: _File, now: float, last: bool) -> Iterator[dict[str, Any]]:
        size = file.path.stat().st_size
        if size < file.position:  # emptied by `rotate_log`
            file.position, file.partial = 0, b""
        if size == file.position and not last:
            yield from file.parser.end()
            return
        if size - file.position > MAX_BEHIND_BYTES:
            skipped = size - file.position - MAX_BYTES_PER_POLL
            file.position, file.partial = file.position + skipped, b""
            yield from file.parser.end()
            message = f"{skipped} bytes of {file.path.name} are left out here: it grew too fast. The file has them."
            yield {"time": now, "level": "WARNING", "message": message}
        with file.path.open("rb") as stream:
            stream.seek(file.position)
            data = stream.read(MAX_BEHIND_BYTES if last else MAX_BYTES_PER_POLL)
        file.position += len(data)
        *lines, partial = (file.partial + data).split(b"\n")
        if last or len(partial) > MAX_LINE:
            lines, partial = [*lines, partial], b""
        file.partial = partial
        for line in lines:
            yield from file.parser.feed(line.decode("utf-8", "replace")[:MAX_LINE], now)
        if last:
            yield from file.parser.end()
