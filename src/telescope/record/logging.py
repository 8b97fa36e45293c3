"""Sends log lines to a file per component, the table `logs`, and the terminal.

Owns the handlers of the root logger of a process.

Invariants: logging never raises and never waits for the record. A failing disk is reported once, on stderr. Files and
the terminal get lines without control sequences.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from telescope.record.files import RunFiles
from telescope.utils.text import plain

if TYPE_CHECKING:  # pyarrow's parquet, which only the driver needs
    from telescope.record.alerts import Alerts
    from telescope.record.recorder import Recorder

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(process)d %(name)s:%(lineno)d %(message)s"
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
"""UTC, so that files of several machines can be merged by time."""

_handlers: list[logging.Handler] = []
"""The handlers of the last `setup_logging`."""


def setup_logging(
    run_dir: Path | str,
    component: str,
    recorder: Recorder | None,
    *,
    alerts: Alerts | None = None,
    debug: bool = False,
    console: bool = True,
) -> None:
    """Sends this process's log lines to its log file and the record.

    The file is `logs/<component>.log`; the table `logs` needs a `recorder`, the alerts of warnings need `alerts`.
    `debug` applies to Telescope's own loggers; others log from WARNING on. With `console`, warnings also go to stderr.
    Replaces the handlers of an earlier call. Never raises because of the disk.
    """
    remove_handlers()
    _handlers.append(_FileHandler(RunFiles(run_dir).log(component)))
    if recorder is not None:
        _handlers.append(_RecordHandler(recorder, alerts, component))
    if console:
        _handlers.append(_ConsoleHandler())
    for handler in _handlers:
        logging.getLogger().addHandler(handler)
    logging.getLogger("telescope").setLevel(logging.DEBUG if debug else logging.INFO)


def remove_handlers() -> None:
    """Removes the handlers of `setup_logging` and closes the file."""
    for handler in _handlers:
        logging.getLogger().removeHandler(handler)
        handler.close()
    _handlers.clear()


class _PlainFormatter(logging.Formatter):
    """Formats lines without control sequences, which a terminal would interpret."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


class _FileHandler(logging.FileHandler):
    """Appends to a file that the first line creates. Reports a failing disk once."""

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
                # Without parents, so that a log line does not create a removed run directory again.
                Path(self.baseFilename).parent.mkdir(exist_ok=True)
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Reports once that lines are lost. Called while the exception is handled."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)  # A wrong format string: logging prints its place.
        elif not self._reported:
            self._reported = True
            print(
                f"telescope: log lines are lost, because {self.baseFilename} cannot be written: {error}",
                file=sys.stderr,
            )


class _RecordHandler(logging.Handler):
    """Writes a row of `logs` per line. The first warning from each place in Telescope's code is also an alert."""

    def __init__(self, recorder: Recorder, alerts: Alerts | None, component: str) -> None:
        super().__init__()
        self._recorder = recorder
        self._alerts = alerts
        self._component = component
        self._alerted: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self.format(record)
        except Exception:  # whatever a wrong format string or the text of an argument raises
            self.handleError(record)  # logging prints its place
            return
        place = f"{record.name}:{record.lineno}"
        self._recorder.write(
            "logs",
            {
                "time": record.created,
                "level": record.levelname,
                "component": self._component,
                "message": message,
                "process": record.process,
                "place": place,
                "source": f"{self._component}.log",
            },
        )
        is_ours = record.name.startswith("telescope") and not getattr(record, "is_reported", False)
        if self._alerts and record.levelno >= logging.WARNING and is_ours and place not in self._alerted:
            self._alerted.add(place)
            level = "warning" if record.levelno == logging.WARNING else "error"
            self._alerts.add({"time": record.created, "level": level, "kind": "log", "message": message})


class _ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes warnings to the current `sys.stderr`, which a live view replaces."""

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)
        self.setFormatter(_PlainFormatter("%(levelname)s %(name)s: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The current `sys.stderr`."""
        return sys.stderr
