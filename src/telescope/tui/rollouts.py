"""Samples: a list with a filter, and the conversation of one."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import DataTable, Input, Static

from telescope.dashboard.rollouts import detail
from telescope.dashboard.samples import FACETS, NUMBERS, Filters, samples
from telescope.errors import UserError
from telescope.tui.page import Page
from telescope.tui.text import number, one_line, safe

NUM_ROWS = 300
COLUMNS = ("step", "sample", "environment", "reward", "adv.", "tokens", "status")
ROLES = {"system": "dim", "user": "bold cyan", "assistant": "bold green", "tool": "bold yellow"}

_RANGE = re.compile(r"^(-?[\d.]*)\.\.(-?[\d.]*)$")


def parse_filter(text: str) -> Filters:
    """Reads a filter: `step=40..50 status=kept reward=0..0.5 some words`. What names no column is searched for.

    Raises `UserError` for a step that is no number or range.
    """
    words, facets, ranges = list[str](), dict[str, str](), list[str]()
    steps: tuple[int | None, int | None] = (None, None)
    for part in text.split():
        name, equals, value = part.partition("=")
        if equals and name == "step":
            steps = _steps(value)
        elif equals and name in NUMBERS and (_RANGE.match(value) or name not in FACETS):
            ranges.append(f"{name}={value}" if _RANGE.match(value) else f"{name}={value}..{value}")
        elif equals and name in FACETS:
            facets[name] = value
        else:
            words.append(part)
    return Filters(search=" ".join(words), facets=facets, ranges=ranges, step_min=steps[0], step_max=steps[1])


def _steps(value: str) -> tuple[int | None, int | None]:
    low, dots, high = value.partition("..")
    try:
        return (int(low) if low else None), (int(high) if high else None) if dots else int(low)
    except ValueError:
        raise UserError(
            f"step={value!r} is neither a step nor a range. Write step=40, step=40..50 or step=40.."
        ) from None


class RolloutsPage(Page):
    """A table of samples, and the conversation of the one under the cursor."""

    TABLES: ClassVar[frozenset[str]] = frozenset({"samples", "attempts"})
    DEFAULT_CSS = """
    RolloutsPage #list { width: 50%; max-width: 68; border-right: solid $surface-lighten-2; }
    RolloutsPage #found { height: 1; padding: 0 1; color: $text-muted; }
    RolloutsPage DataTable { height: 1fr; background: $background; }
    RolloutsPage #conversation { width: 1fr; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "move(1)", show=False),
        Binding("k", "move(-1)", show=False),
        Binding("s", "sort", "Sort"),
        Binding("f", "follow", "Newest"),
    ]
    ORDERS = ("-step", "-reward", "reward", "-completion_tokens")

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self._filter = ""
        self._order = self.ORDERS[0]
        self._rows: list[dict[str, Any]] = []
        self._chosen: tuple[int, str] | None = None

    def compose(self) -> ComposeResult:
        """Creates table and conversation."""
        with Horizontal():
            with Vertical(id="list"):
                yield Input(placeholder="/ words, step=40..50 status=kept reward=0..0.5", id="sample-filter")
                yield Static(id="found", markup=False)
                yield DataTable(id="samples", cursor_type="row", zebra_stripes=False)
            with VerticalScroll(id="conversation"):
                yield Static(id="sample", markup=False)

    def on_mount(self) -> None:
        """Creates the columns."""
        self.query_one(DataTable).add_columns(*COLUMNS)

    def focus_first(self) -> None:
        """Puts the cursor into the table."""
        self.query_one(DataTable).focus()

    def read(self) -> dict[str, Any]:
        """Returns the first samples of the filter. Raises `UserError` for a wrong one."""
        return samples(self.view.store, parse_filter(self._filter), sort=self._order, offset=0, limit=NUM_ROWS)

    def show(self, found: dict[str, Any]) -> None:
        """Fills the table. The cursor stays on its sample."""
        self._rows = found["rows"]
        table = self.query_one(DataTable)
        # Before the rows change: the table moves its cursor to the first row meanwhile.
        chosen = self._chosen
        table.clear()
        for row in self._rows:
            table.add_row(*(Text(cell, justify=side) for cell, side in _cells(row)))  # type: ignore[arg-type]
        keys = [(row["attempt"], row["sample_id"]) for row in self._rows]
        if keys:
            table.move_cursor(row=keys.index(chosen) if chosen in keys else 0)
        else:
            self.query_one("#sample", Static).update(Text("No sample passes the filter.", "dim"))
        more = f", the first {len(keys)} are shown" if found["total"] > len(keys) else ""
        self.query_one("#found", Static).update(f"{found['total']:,} samples by {self._order}{more}")

    @on(Input.Submitted, "#sample-filter")
    def filter_submitted(self, event: Input.Submitted) -> None:
        """Reads the samples of the filter."""
        self._filter, self._chosen = event.value, None
        self.focus_first()
        self.refresh_data()

    @on(DataTable.RowHighlighted)
    def row_chosen(self, event: DataTable.RowHighlighted) -> None:
        """Shows the conversation of the row under the cursor."""
        if not 0 <= event.cursor_row < len(self._rows):
            return
        row = self._rows[event.cursor_row]
        key = (row["attempt"], row["sample_id"])
        if key != self._chosen:
            self._chosen = key
            self.in_thread(lambda: detail(self.view.store, *key), self._show_sample, "sample")

    def action_move(self, by: int) -> None:
        """Moves the cursor of the table."""
        table = self.query_one(DataTable)
        table.action_cursor_down() if by > 0 else table.action_cursor_up()

    def action_sort(self) -> None:
        """Takes the next order."""
        self._order = self.ORDERS[(self.ORDERS.index(self._order) + 1) % len(self.ORDERS)]
        self._chosen = None
        self.refresh_data()

    def action_follow(self) -> None:
        """Goes to the newest sample."""
        self._order, self._chosen = self.ORDERS[0], None
        self.refresh_data()

    def _show_sample(self, sample: dict[str, Any]) -> None:
        self.query_one("#sample", Static).update(draw_sample(sample))
        self.query_one("#conversation", VerticalScroll).scroll_home(animate=False)


def _cells(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (number(row["step"]), "right"), (one_line(row["sample_id"]), "left"),
        (one_line(row["environment"])[:12], "left"),
        (number(row["reward"], 3), "right"), (number(row["advantage"], 3), "right"),
        (number(row["completion_tokens"]), "right"), (one_line(row["status"]), "left"),
    ]  # fmt: skip


def draw_sample(sample: dict[str, Any]) -> RenderableType:
    """Returns a sample: its numbers, prompt, turns with tool calls, and gold answers."""
    numbers = {
        "reward": number(sample["reward"]), "advantage": number(sample["advantage"]),
        "tokens": number(sample["completion_tokens"]), "stopped by": one_line(sample["stop_reason"]),
        "versions": f"{sample['start_version']} to {sample['end_version']}", "server": number(sample["server"]),
    }  # fmt: skip
    numbers |= {one_line(name): number(value) for name, value in sample["metrics"].items()}
    head = Text("   ").join(Text.assemble((f"{name} ", "dim"), value) for name, value in numbers.items())
    why = f" ({one_line(sample['reason'])})" if sample["reason"] else ""
    title = (one_line(sample["sample_id"]), one_line(sample["environment"]), f"step {number(sample['step'])}")
    parts: list[RenderableType] = [Text("  ".join((*title, f"{sample['status']}{why}")), "bold"), head]
    if sample["failure_message"]:
        parts += [Text(), safe(sample["failure_message"], "yellow")]
    parts += [Text(), Text("prompt", ROLES["user"]), safe(sample["prompt_text"])]
    calls: dict[int, list[dict[str, Any]]] = {}
    for call in sample["tool_calls"]:
        calls.setdefault(call["turn"], []).append(call)
    answers = 0
    for turn in sample["turns"]:
        role = turn["role"] or ""
        parts += [Text(), Text(one_line(role), ROLES.get(role, "bold")), safe(turn["text"])]
        if role == "assistant":
            parts += [_call(call) for call in calls.get(answers, [])]
            answers += 1
    if not sample["turns"]:
        parts += [Text(), Text("assistant", ROLES["assistant"]), safe(sample["completion_text"])]
    for name, value in sample["golden"].items():
        parts += [Text(), Text.assemble((f"gold {one_line(name)}: ", "dim"), safe(value))]
    return Group(*parts)


def _call(call: dict[str, Any]) -> Text:
    outcome = one_line(call["error"]) or one_line(call["result"])
    style = "yellow" if call["error"] else "dim"
    text = f"  {one_line(call['name'])} {one_line(call['arguments'])} → {outcome} ({number(call['seconds'], 2)} s)"
    return Text(text, style)
