"""The live view of a run in a terminal, and the plain lines that stand in for it elsewhere.

Reads `RunStatus` a few times a second on a thread of its own and draws; owns nothing of the run, and can be stopped at
any time without consequence for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from telescope.orchestrator.status import RunStatus, StepSummary

REFRESH_PER_SECOND = 4
LAST_STEPS = 6
SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a line of at most `width` blocks, each the mean of its share of them, scaled to their own range."""
    if not values or width <= 0:
        return ""
    num_cells = min(width, len(values))
    cells = []
    for cell in range(num_cells):
        part = values[cell * len(values) // num_cells : max((cell + 1) * len(values) // num_cells, 1)]
        cells.append(sum(part) / len(part))
    low, high = min(cells), max(cells)
    span = high - low
    return "".join(
        SPARKS[round((value - low) / span * (len(SPARKS) - 1))] if span > 0 else SPARKS[0] for value in cells
    )


def clock(seconds: float | None) -> str:
    """`1:02:03`, `2:03`, or a dash when it is not known."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def render(status: RunStatus, width: int = 100) -> RenderableType:
    """One frame of the live view."""
    return Panel(
        Group(_progress(status, width), Text(), _numbers(status, width), Text(), _parts(status), *_messages(status)),
        title=f"[bold]telescope[/] · {status.run_name}",
        title_align="left",
        border_style="dim",
        width=width,
        padding=(1, 2),
    )


def _progress(status: RunStatus, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    left = clock(status.seconds_left())
    elapsed = clock(time.time() - status.started_at)
    if status.eval_total and status.eval_done < status.eval_total:
        done, total, what = status.eval_done, status.eval_total, f"eval {status.eval_done}/{status.eval_total}"
    else:
        done, total, what = status.step, status.num_steps, f"step {status.step}/{status.num_steps}"
    bar = ProgressBar(total=max(total, 1), completed=done, width=max(10, width - 62))
    grid.add_row(Text(what, style="bold"), bar, Text(f"elapsed {elapsed}"), Text(f"left {left}"))
    return Group(Text(status.phase, style="cyan"), grid)


def _numbers(status: RunStatus, width: int) -> RenderableType:
    if not status.history:
        return Text("no step finished yet", style="dim")
    rewards = [summary.reward_mean for summary in status.history]
    last = status.history[-1]
    head = Text.assemble(
        ("reward ", "dim"), (f"{last.reward_mean:.3f} ", "bold green"), (sparkline(rewards, max(8, width - 50)), "green"),
        ("  from ", "dim"), f"{rewards[0]:.3f}",
    )  # fmt: skip
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("step", "reward", "tokens/s", "staleness", "KL engine", "grad norm", "entropy", "waited", "seconds"):
        table.add_column(name, justify="right")
    for summary in status.history[-LAST_STEPS:]:
        table.add_row(*_cells(summary))
    return Group(head, Text(), table)


def _cells(summary: StepSummary) -> list[str]:
    return [
        str(summary.step + 1),
        f"{summary.reward_mean:.3f}",
        f"{summary.tokens_per_second:,.0f}",
        f"{summary.staleness_mean:.2f}",
        f"{summary.kl_inference:.1e}",
        f"{summary.grad_norm:.3f}",
        f"{summary.entropy:.3f}",
        f"{summary.waited_share:.0%}",
        f"{summary.seconds:.2f}",
    ]


def _parts(status: RunStatus) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=10)
    grid.add_column()
    grid.add_row(
        "rollouts",
        f"{status.num_generating}/{status.num_lanes} lanes · {status.num_open_groups} groups open · "
        f"{status.num_finished_groups} ready · {status.num_discarded_groups} discarded · "
        f"{status.num_masked_samples} masked · {status.tokens_per_second():,.0f} tokens/s",
    )
    for part, doing in sorted(status.parts.items()):
        grid.add_row(part, doing)
    return grid


def _messages(status: RunStatus) -> list[RenderableType]:
    messages = list(status.messages)
    return [Text(), *(Text(f"· {message}", style="yellow") for message in messages)] if messages else []


def step_line(summary: StepSummary, num_steps: int) -> str:
    """A finished step as one line, for logs and for terminals that cannot be redrawn."""
    return (
        f"step {summary.step + 1}/{num_steps}  reward {summary.reward_mean:.3f}  {summary.tokens_per_second:,.0f} tokens/s  "
        f"staleness {summary.staleness_mean:.2f}  KL {summary.kl_inference:.1e}  grad norm {summary.grad_norm:.3f}  "
        f"waited {summary.waited_share:.0%}  {summary.seconds:.2f} s"
    )


class LiveView:
    """Shows a run until `stop`. On a terminal it redraws; elsewhere it prints a line per phase, message and step."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, status: RunStatus) -> None:
        """Begin to show `status`."""
        target = self._redraw if self._console.is_terminal else self._print_lines
        self._thread = threading.Thread(target=target, args=(status,), name="live view", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Draw the last state and give the terminal back."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None

    def _redraw(self, status: RunStatus) -> None:
        def frame() -> RenderableType:
            return render(status, min(self._console.width, 110))

        with Live(frame(), console=self._console, auto_refresh=False, transient=False) as live:
            while not self._stop.wait(1 / REFRESH_PER_SECOND):
                live.update(frame(), refresh=True)
            live.update(frame(), refresh=True)

    def _print_lines(self, status: RunStatus) -> None:
        phase, num_shown, shown_messages = "", 0, set[str]()
        stopping = False
        while not stopping:
            stopping = self._stop.wait(1 / REFRESH_PER_SECOND)
            if status.phase != phase:
                phase = status.phase
                self._console.print(
                    f"[{clock(time.time() - status.started_at)}] {phase}", highlight=False, markup=False
                )
            for message in list(status.messages):
                if message not in shown_messages:
                    shown_messages.add(message)
                    self._console.print(message, highlight=False, markup=False)
            history = list(status.history)
            for summary in history[num_shown:]:
                self._console.print(step_line(summary, status.num_steps), highlight=False, markup=False)
            num_shown = len(history)
