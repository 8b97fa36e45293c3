"""Progress of a long step on stderr: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_SECONDS = 5.0
"""Between two lines where there is no terminal."""


@contextmanager
def progress(name: str, unit: str = "", per_unit: float = 1) -> Iterator[Callable[..., None]]:
    """Yields a function that shows a done amount, a total and a note.

    Both numbers are divided by `per_unit` before they are shown with `unit`.
    """
    if not sys.stderr.isatty():
        yield _lines(name, unit, per_unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    amount = TextColumn("{task.completed:.4g}/{task.total:.4g}" + unit)
    columns = (TextColumn(name), BarColumn(), amount, TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=0, note="", visible=False)
        yield lambda done, total, note="": bar.update(
            task, completed=done / per_unit, total=total / per_unit, note=note, visible=True
        )


def _lines(name: str, unit: str, per_unit: float) -> Callable[..., None]:
    last = time.monotonic()

    def report(done: float, total: float, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_SECONDS or done == total:
            last = now
            text = f"{name}: {done / per_unit:.4g}/{total / per_unit:.4g}{unit}"
            print(f"{text}, {note}" if note else text, file=sys.stderr, flush=True)

    return report
