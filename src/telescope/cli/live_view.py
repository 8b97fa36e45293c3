"""The live view of a run, and progress of other commands.

Both print plain lines without a terminal.

The view reads `RunStatus` a few times per second in its own thread and draws it. It can be stopped at any time without
affecting the run.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from telescope.orchestrator.status import RunStatus, StepSummary
from telescope.utils.text import plain, single_line

REFRESH_PER_SECOND = 4
LAST_STEPS = 6
SPARKS = "▁▂▃▄▅▆▇█"
FRAME_COLUMNS = 6  # width of the frame and its padding
COLUMN_GAP = 2
HINT = " · Ctrl-C ends it cleanly"
MIN_BAR_COLUMNS = 8
ALWAYS_SHOWN = ("step", "reward", "tokens/s", "staleness", "seconds")
"""Columns of the step table at every width, 44 characters together."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns means of the finite values as at most `width` blocks, scaled to their range. Blank without any."""
    if not values or width <= 0:
        return ""
    num_cells = min(width, len(values))
    cells: list[float | None] = []
    for cell in range(num_cells):
        share = values[cell * len(values) // num_cells : (cell + 1) * len(values) // num_cells]
        finite = [value for value in share if math.isfinite(value)]
        cells.append(sum(finite) / len(finite) if finite else None)
    known = [cell for cell in cells if cell is not None]
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low
    return "".join(" " if cell is None else _block(cell - low, span) for cell in cells)


def _block(height: float, span: float) -> str:
    # A range that is not finite (values near the largest float) has no scale.
    if span <= 0 or not math.isfinite(height / span):
        return SPARKS[0]
    return SPARKS[min(round(height / span * (len(SPARKS) - 1)), len(SPARKS) - 1)]


def clock(seconds: float | None) -> str:
    """Formats `1:02:03`, `2:03`, or a dash if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def render(status: RunStatus, width: int = 100, watch: str = "") -> RenderableType:
    """Returns one frame, with the more important numbers if it is narrow. `watch` is the command that opens the run."""
    inside = width - FRAME_COLUMNS
    return Panel(
        Group(
            _progress(status, inside),
            Text(),
            _numbers(status, inside),
            Text(),
            _components(status, watch),
            *_messages(status),
        ),
        title=Text.assemble(("telescope", "bold"), f" · {single_line(status.run_name)}"),
        title_align="left",
        subtitle=Text(_last_columns(plain(status.run_dir), inside - cell_len(HINT)) + HINT if status.run_dir else ""),
        subtitle_align="left",
        border_style="dim",
        width=width,
        padding=(1, 2),
    )


def _last_columns(text: str, columns: int) -> str:
    """Returns the last columns of a text: a path's informative part."""
    if cell_len(text) <= columns:
        return text
    while text and cell_len(text) >= columns:
        text = text[1:]
    return f"…{text}"


def _line(text: str, style: str = "") -> Text:
    """Returns untrusted text as one line, without markup."""
    return Text(plain(text).replace("\n", " "), style=style, no_wrap=True, overflow="ellipsis")


def _progress(status: RunStatus, inside: int) -> RenderableType:
    if status.eval_total and status.eval_done < status.eval_total:
        done, total, what = status.eval_done, status.eval_total, f"eval {status.eval_done}/{status.eval_total}"
    else:
        done, total, what = status.step, status.num_steps, f"step {status.step}/{status.num_steps}"
    elapsed = f"elapsed {clock(time.time() - status.started_at)}"
    left = f"left {clock(status.seconds_left())}"
    cells: list[RenderableType] = [Text(what, style="bold", no_wrap=True)]
    bar_width = inside - len(what) - len(elapsed) - len(left) - 3 * COLUMN_GAP
    if bar_width >= MIN_BAR_COLUMNS:
        cells.append(ProgressBar(total=max(total, 1), completed=done, width=bar_width))
    if bar_width >= -COLUMN_GAP:
        cells.append(Text(elapsed, no_wrap=True))
    cells.append(Text(left, no_wrap=True))
    grid = Table.grid(padding=(0, COLUMN_GAP))
    grid.add_row(*cells)
    return Group(_line(status.phase, "cyan"), grid)


def _numbers(status: RunStatus, inside: int) -> RenderableType:
    history = list(status.history)
    if not history:
        return Text("no step finished yet", style="dim")
    rewards = [summary.reward_mean for summary in history]
    head = Text.assemble(
        ("reward ", "dim"), (f"{rewards[-1]:.3f} ", "bold green"), (sparkline(rewards, max(8, inside - 59)), "green"),
        ("  from ", "dim"), f"{rewards[0]:.3f}", (f", trained {history[-1].reward_trained:.3f}", "dim"),
    )  # fmt: skip
    columns = _columns_that_fit(history[-LAST_STEPS:], inside)
    table = Table(box=None, padding=(0, COLUMN_GAP, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return Group(head, Text(), table)


def _columns_that_fit(summaries: Sequence[StepSummary], inside: int) -> dict[str, list[str]]:
    """Returns the columns of the step table that fit into `inside`."""
    cells: dict[str, list[str]] = {
        "step": [str(s.step + 1) for s in summaries],
        "reward": [f"{s.reward_mean:.3f}" for s in summaries],
        "trained": [f"{s.reward_trained:.3f}" for s in summaries],
        "tokens/s": [f"{s.tokens_per_second:,.0f}" for s in summaries],
        "staleness": [f"{s.staleness_mean:.2f}" for s in summaries],
        "KL engine": [f"{s.kl_inference:.1e}" for s in summaries],
        "grad norm": [f"{s.grad_norm:.3g}" for s in summaries],
        "entropy": [f"{s.entropy:.3f}" for s in summaries],
        "waited": [f"{s.waited_share:.0%}" for s in summaries],
        "seconds": [f"{s.seconds:.2f}" for s in summaries],
    }
    chosen: set[str] = set()
    for name in (*ALWAYS_SHOWN, *(name for name in cells if name not in ALWAYS_SHOWN)):
        columns = max(len(name), *map(len, cells[name])) + COLUMN_GAP
        if columns <= inside or name in ALWAYS_SHOWN:
            chosen.add(name)
            inside -= columns
    return {name: column for name, column in cells.items() if name in chosen}


def _components(status: RunStatus, watch: str) -> RenderableType:
    grid = Table.grid(padding=(0, COLUMN_GAP))
    grid.add_column(style="dim", min_width=10)
    grid.add_column()
    grid.add_row(
        "rollouts",
        Text(
            f"{status.num_generating}/{status.num_slots} slots · {status.num_open_groups} groups open · "
            f"{status.num_finished_groups} ready · {status.num_discarded_groups} discarded · "
            f"{status.num_masked_samples} masked · "
            + (f"{status.num_long_prompts} prompts too long · " if status.num_long_prompts else "")
            + f"{status.tokens_per_second():,.0f} tokens/s"
        ),
    )
    for part, doing in sorted(status.components.items()):
        grid.add_row(_line(part), _line(doing))
    if watch:
        grid.add_row("watch it", Text(plain(watch), style="bold"))
    return grid


def _messages(status: RunStatus) -> list[RenderableType]:
    messages = list(status.messages)
    return [Text(), *(Text(f"· {plain(message)}", style="yellow") for message in messages)] if messages else []


def step_line(summary: StepSummary, num_steps: int) -> str:
    """Formats a finished step as one line, for logs and pipes."""
    return (
        f"step {summary.step + 1}/{num_steps}  reward {summary.reward_mean:.3f} "
        f"({summary.reward_trained:.3f} trained)  "
        f"{summary.tokens_per_second:,.0f} tokens/s  staleness {summary.staleness_mean:.2f}  "
        f"KL {summary.kl_inference:.1e}  grad norm {summary.grad_norm:.3f}  "
        f"waited {summary.waited_share:.0%}  {summary.seconds:.2f} s"
    )


class LiveView:
    """Shows a run until `stop`: redraws a terminal, or prints lines. `watch` returns the command for a folder."""

    def __init__(self, console: Console | None = None, watch: Callable[[str], str] = lambda run_dir: "") -> None:
        self._console = console or Console(stderr=True)
        self._watch = watch
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

    def _redraw(self, status: RunStatus) -> None:
        def frame() -> RenderableType:
            return render(status, min(self._console.width, 110), self._watch(status.run_dir))

        with Live(frame(), console=self._console, auto_refresh=False, transient=False) as live:
            while not self._stop.wait(1 / REFRESH_PER_SECOND):
                live.update(frame(), refresh=True)
            live.update(frame(), refresh=True)

    def _print_lines(self, status: RunStatus) -> None:
        shown_phase, num_shown, shown_messages = "", 0, set[str]()
        stopping = False

        def show_phase(phase: str) -> None:
            nonlocal shown_phase
            if phase != shown_phase:
                shown_phase = phase
                moment = clock(time.time() - status.started_at)
                self._console.print(f"[{moment}] {plain(phase)}", highlight=False, markup=False)

        if watch := self._watch(status.run_dir):
            self._console.print(f"Watch it with {plain(watch)}", highlight=False, markup=False, soft_wrap=True)
        while not stopping:
            stopping = self._stop.wait(1 / REFRESH_PER_SECOND)
            phase = status.phase
            history = list(status.history)  # read after the phase, so that it has all steps before it
            show_phase(next((summary.phase for summary in history[num_shown:]), phase))
            for message in list(status.messages):
                if message not in shown_messages:
                    shown_messages.add(message)
                    self._console.print(plain(message), highlight=False, markup=False, soft_wrap=True)
            for summary in history[num_shown:]:
                show_phase(summary.phase)
                self._console.print(step_line(summary, status.num_steps), highlight=False, markup=False, soft_wrap=True)
            num_shown = len(history)
            if status.phase == phase:  # if it changed meanwhile, the next iteration prints the steps before it
                show_phase(phase)


class PhaseView(LiveView):
    """The phase of a command: a redrawn line, or lines."""

    def say(self, text: str) -> None:
        """Prints one line above the redrawn one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _redraw(self, status: RunStatus) -> None:
        with self._console.status("") as line:
            while not self._stop.wait(0.2):
                parts = ", ".join(f"{part}: {doing}" for part, doing in sorted(status.components.items()))
                starting = status.phase.startswith("starting the")
                seconds = time.time() - status.started_at
                done = f": {status.eval_done}/{status.eval_total}" if status.eval_total else ""
                line.update(Text(f"{seconds:.0f} s  {status.phase}{done}" + (f" ({parts})" if starting else "")))

    def _print_lines(self, status: RunStatus) -> None:
        shown = ""
        while not self._stop.wait(0.2):
            if status.phase != shown:
                shown = status.phase
                self.say(f"[{time.time() - status.started_at:.0f} s] {shown}")


LINE_SECONDS = 5.0  # between two lines where there is no terminal


@contextmanager
def progress(name: str, unit: str = "", per_unit: float = 1) -> Iterator[Callable[..., None]]:
    """Yields a function that shows amount and total, over `per_unit`, and a note: as a bar, or as lines in a pipe."""
    if not sys.stderr.isatty():
        yield _lines(name, unit, per_unit)
        return
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
