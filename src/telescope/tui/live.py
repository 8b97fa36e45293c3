"""Shows the progress of commands: an overview for `telescope train`, the phase or a progress bar for others.

Without a terminal, each view prints plain lines to stderr. A view has its own thread, only reads, and can be stopped at
any time without affecting the run.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.text import Text

from telescope.errors import EXIT_INTERRUPTED, InfrastructureError, RunError
from telescope.orchestrator.status import Interrupted, RunStatus, StepSummary
from telescope.tui.text import clock, safe
from telescope.utils.text import plain, single_line

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.5
READ_SECONDS = 2.0
"""Time between two reads of the record, equal to the time between two flushes of a run."""
MOST_COLUMNS = 130
HINT = "Ctrl-C ends it cleanly"


def step_line(summary: StepSummary, num_steps: int) -> str:
    """Formats a finished step as one line, for logs and pipes."""
    return (
        f"step {summary.step} ({summary.step + 1} of {num_steps})  reward {summary.reward_mean:.3f} "
        f"({summary.reward_trained:.3f} trained)  "
        f"{summary.tokens_per_second:,.0f} tokens/s  staleness {summary.staleness_mean:.2f}  "
        f"KL {summary.kl_inference:.1e}  grad norm {summary.grad_norm:.3f}  "
        f"waited {summary.waited_share:.0%}  {summary.seconds:.2f} s"
    )


class PhaseView:
    """Shows the phase of a command until `stop`, on one redrawn line in a terminal and as lines elsewhere."""

    _says_messages = False

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, status: RunStatus) -> None:
        """Starts showing `status`."""
        target = self._redraw if self._console.is_terminal else self._print_lines
        self._thread = threading.Thread(target=target, args=(status,), name="live view", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Draws the last state and releases the terminal."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None

    def say(self, text: str) -> None:
        """Prints one line, above the redrawn line if there is one."""
        self._console.out(plain(text), highlight=False)

    def _redraw(self, status: RunStatus) -> None:
        with self._console.status("") as line:
            while not self._stop.wait(REFRESH_SECONDS):
                parts = ", ".join(f"{part}: {doing}" for part, doing in sorted(status.components.items()))
                starting = f" ({parts})" if status.phase.startswith("starting the") else ""
                done = f": {status.eval_done}/{status.eval_total}" if status.eval_total else ""
                seconds = time.time() - status.started_at
                line.update(Text(f"{seconds:.0f} s  {status.phase}{done}{starting}"))

    def _print_lines(self, status: RunStatus) -> None:
        """Prints phases, messages and steps. A step is printed after the phase in which it ended."""
        shown_phase, num_steps, said, stopping = "", 0, set[str](), False

        def show(phase: str, *lines: str) -> None:
            nonlocal shown_phase
            if phase != shown_phase:
                shown_phase = phase
                self.say(f"[{clock(time.time() - status.started_at)}] {phase}")
            for line in lines:
                self.say(line)

        while not stopping:
            stopping = self._stop.wait(REFRESH_SECONDS)
            phase = status.phase
            history = status.history[num_steps:]  # read after the phase, so that it has all of the phase's steps
            num_steps += len(history)
            messages = [message for message in list(status.messages) if message not in said and self._says_messages]
            said.update(messages)
            show(history[0].phase if history else phase, *messages)
            for summary in history:
                show(summary.phase, step_line(summary, status.num_steps))
            if status.phase == phase:  # if it changed meanwhile, the next iteration first prints the earlier steps
                show(phase)


@contextmanager
def phases(what: str, notes: Iterable[str], again: str = "") -> Iterator[PhaseView]:
    """Shows notes, then the phases of a command. An interruption ends the command; a failure becomes a `RunError`."""
    view = PhaseView()
    for note in notes:
        view.say(f"· {note}")
    try:
        yield view
    except Interrupted:
        view.say(f"Interrupted; every process was ended{again}")
        raise SystemExit(EXIT_INTERRUPTED) from None
    except InfrastructureError as error:
        raise RunError(f"the {what} could not continue: {error}{again}") from error
    finally:
        view.stop()


class LiveView(PhaseView):
    """Shows the overview of a training run. `watch` returns the command that opens a folder in the dashboard."""

    _says_messages = True

    def __init__(self, console: Console | None = None, watch: Callable[[str], str] = lambda run_dir: "") -> None:
        super().__init__(console)
        self._watch = watch

    def start(self, status: RunStatus) -> None:
        """Starts showing `status`. Without a terminal, prints the command that shows more."""
        if not self._console.is_terminal and (watch := self._watch(status.run_dir)):
            self.say(f"Watch it with {watch}")
        super().start(status)

    def _redraw(self, status: RunStatus) -> None:
        with Live(safe(status.phase, "green"), console=self._console, auto_refresh=False) as live:
            from telescope.dashboard.registry import Registry
            from telescope.tui.overview import draw, read_overview

            registry = Registry([Path(status.run_dir)])
            found: dict[str, Any] | None = None
            due, stopping, problem = 0.0, False, ""
            while not stopping:
                stopping = self._stop.wait(REFRESH_SECONDS)
                shown: RenderableType = safe(status.phase, "green")
                try:
                    if stopping or time.monotonic() >= due:
                        due = time.monotonic() + READ_SECONDS
                        for run_id in registry.stores():  # none until the record has begun
                            found = read_overview(registry, run_id)
                    if found is not None:
                        width, height = min(self._console.width, MOST_COLUMNS), self._console.height
                        shown = draw({**found, "now": status.now()}, width, height)
                except Exception as error:  # the run continues without its view
                    if repr(error) != problem:
                        problem = repr(error)
                        logger.info("the record of the run cannot be shown: %s", problem, exc_info=True)
                live.update(self._frame(status, shown), refresh=True)

    def _frame(self, status: RunStatus, shown: RenderableType) -> RenderableType:
        title = Text.assemble(("telescope", "bold"), f" · {single_line(status.run_name)}")
        where = " · ".join(filter(None, (self._watch(status.run_dir), HINT)))
        notes = [safe(f"· {single_line(note)}", "yellow") for note in status.unrecorded()]
        return Group(Rule(title, align="left", style="dim"), safe(where, "dim"), Text(), shown, *notes)


LINE_SECONDS = 5.0  # between two lines without a terminal


@contextmanager
def progress(name: str, unit: str = "", per_unit: float = 1) -> Iterator[Callable[..., None]]:
    """Yields a function that shows an amount, a total (both divided by `per_unit`) and a note as a bar or as lines."""
    console = Console(stderr=True)
    amount = TextColumn("{task.completed:.4g}/{task.total:.4g}" + unit)
    columns = (TextColumn(name), BarColumn(), amount, TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    last = time.monotonic()

    def report(done: float, total: float, note: str = "") -> None:
        nonlocal last
        done, total = done / per_unit, total / per_unit
        bar.update(task, completed=done, total=total, note=note, visible=True)
        if not console.is_terminal and (done == total or time.monotonic() - last >= LINE_SECONDS):
            last = time.monotonic()
            text = f"{name}: {done:.4g}/{total:.4g}{unit}"
            console.out(f"{text}, {note}" if note else text, highlight=False)

    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=0, note="", visible=False)
        yield report
