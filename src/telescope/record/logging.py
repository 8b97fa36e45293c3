"""Where log lines go: a file per component, the table `logs`, and warnings to the terminal.

Owns the handlers on the root logger of a process. Does not own what is said, or the terminal's live view.

Invariants: logging never raises and never waits for the record. A disk that takes no lines is said once, on stderr.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from telescope.record.files import RunFiles
from telescope.record.recorder import Recorder
from telescope.utils.text import plain

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(process)d %(name)s:%(lineno)d %(message)s"
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
"""UTC, so that the files of several machines can be merged by time."""


@dataclass(frozen=True, slots=True)
class LogHandlers:
    """What `setup_logging` installed."""

    handlers: tuple[logging.Handler, ...]

    def close(self) -> None:
        """Take the handlers off again and close the file."""
        for handler in self.handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()


def setup_logging(
    run_dir: Path | str,
    component: str,
    recorder: Recorder | None,
    *,
    level: int = logging.INFO,
    console: bool = True,
) -> LogHandlers:
    """Send this process's log lines to `logs/<component>.log`, and to the table `logs` if there is a `recorder`.

    `level` holds for Telescope's own loggers; others speak from WARNING on. With `console`, warnings also go to stderr.
    Replaces what an earlier call in this process installed. Never raises because of the disk.
    """
    root = logging.getLogger()
    LogHandlers(tuple(handler for handler in root.handlers if isinstance(handler, _Ours))).close()
    handlers: list[logging.Handler] = [_FileHandler(RunFiles(run_dir).log(component))]
    if recorder is not None:
        handlers.append(_RecordHandler(recorder, component))
    if console:
        handlers.append(_ConsoleHandler())
    for handler in handlers:
        root.addHandler(handler)
    logging.getLogger("telescope").setLevel(level)
    return LogHandlers(tuple(handlers))


class _PlainFormatter(logging.Formatter):
    """Formats lines without control sequences, which whoever reads the log would send to a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


class _Ours:
    """Marks the handlers that a later call of `setup_logging` replaces."""


class _FileHandler(_Ours, logging.FileHandler):
    """Appends to a file that is made with its first line. A failing disk is reported once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="replace", delay=True)
        with contextlib.suppress(OSError):  # reported with the first line
            path.parent.mkdir(parents=True, exist_ok=True)
        self._reported = False
        formatter = _PlainFormatter(_FORMAT, _TIME_FORMAT)
        formatter.converter = time.gmtime
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.stream is None:
                # Without its parents: a run directory that was removed is not made again for the sake of a log.
                Path(self.baseFilename).parent.mkdir(exist_ok=True)
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say once that lines are lost. Called with the exception in flight."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)  # A format string that does not fit its values: logging says where.
        elif not self._reported:
            self._reported = True
            print(f"telescope: {self.baseFilename} cannot be written, its lines are lost: {error}", file=sys.stderr)


class _RecordHandler(_Ours, logging.Handler):
    """A row of `logs` per line."""

    def __init__(self, recorder: Recorder, component: str) -> None:
        super().__init__()
        self._recorder = recorder
        self._component = component
        self._formatter = logging.Formatter("%(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self._formatter.format(record)
        except (TypeError, ValueError):
            self.handleError(record)  # A format string that does not fit its values: logging says where.
            return
        self._recorder.write(
            "logs",
            {
                "time": record.created,
                "level": record.levelname,
                "component": self._component,
                "message": message,
                "process": record.process,
                "place": f"{record.name}:{record.lineno}",
            },
        )


class _ConsoleHandler(_Ours, logging.StreamHandler[TextIO]):
    """Warnings on whatever `sys.stderr` is when the line is said: a live view puts itself in front of it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)
        self.setFormatter(_PlainFormatter("%(levelname)s %(name)s: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The stream to write to."""
        return sys.stderr
