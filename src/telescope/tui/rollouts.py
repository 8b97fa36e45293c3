"""Shows a filtered list of samples, and the conversation of the selected sample."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import DataTable, Input, Static

from telescope.dashboard.conversations import is_answer
from telescope.dashboard.rollouts import detail
from telescope.dashboard.samples import FACETS, NUMBERS, Filters, SampleQuery, samples
from telescope.errors import UserError
from telescope.tui.pages import Page, next_of
from telescope.tui.text import number, safe
from telescope.utils.text import pluralize, single_line

NUM_ROWS = 300
TEXTS = ("status", "environment", "sample_id")
COLUMNS = {
    "step": "step", "reward": "reward", "tokens": "completion_tokens", "status": "status", "adv.": "advantage",
    "environment": "environment", "sample": "sample_id",
}  # fmt: skip
"""Columns of the table by title. A narrow table shows the first columns; the arrow keys scroll to the others."""

ORDERS = {
    "-step": "newest first", "-reward": "highest reward first", "reward": "lowest reward first",
    "-completion_tokens": "longest first",
}  # fmt: skip
KINDS = {"training": "kept,discarded,masked,cancelled", "eval": "eval", "": ""}
"""Kinds of samples, and their statuses. A step often has more eval samples than training samples."""

INDENT = 4
"""Columns by which a branch is indented relative to the conversation that it leaves."""

ROLES = {"system": "dim", "user": "bold cyan", "assistant": "bold green", "tool": "bold yellow"}


def parse_filter(text: str) -> Filters:
    """Parses a filter like `step=40..50 status=kept reward=0..0.5 some words`. Searches for words without a column.

    Raises `UserError` for a step that is neither a number nor a range.
    """
    words, facets, ranges = list[str](), dict[str, Any](), list[str]()
    steps: list[int | None] = [None, None]
    for part in text.split():
        name, equals, value = part.partition("=")
        low, dots, high = value.partition("..")
        if equals and name == "step":
            try:
                steps = [int(end) if end else None for end in (low, high if dots else low)]
                Filters(step_min=steps[0], step_max=steps[1])  # a step that fits no column
            except ValueError:
                raise UserError(
                    f"step={value!r} is neither a step nor a range. Write step=40, step=40..50 or step=40.."
                ) from None
        elif equals and name in NUMBERS and (dots or name not in FACETS):
            ranges.append(f"{name}={low}..{high if dots else low}")
        elif equals and name in FACETS:
            facets[name] = value
        else:
            words.append(part)
    return Filters(search=" ".join(words), range=ranges, step_min=steps[0], step_max=steps[1], **facets)


class RolloutsPage(Page):
    """Shows a table of samples, and the selected conversation."""

    FIRST = "#samples"
    DEFAULT_CSS = """
    RolloutsPage #list { width: 50%; max-width: 68; border-right: solid $surface-lighten-2; }
    RolloutsPage #found { height: auto; padding: 0 1; color: $text-muted; }
    RolloutsPage DataTable { height: 1fr; background: $background; }
    RolloutsPage #conversation { width: 1fr; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort"),
        Binding("e", "kind", "Evals"),
        Binding("f", "follow", "Newest"),
    ]

    _order = next(iter(ORDERS))
    _kind = next(iter(KINDS))
    _rows: Sequence[dict[str, Any]] = ()
    _chosen: tuple[int, str] | None = None

    def compose(self) -> ComposeResult:
        with Horizontal():
            with Vertical(id="list"):
                yield Input(placeholder="/ words, step=40..50 status=kept reward=0..0.5", id="sample-filter")
                yield Static(id="found", markup=False)
                yield DataTable(id="samples", cursor_type="row", zebra_stripes=False)
            with VerticalScroll(id="conversation"):
                yield Static(id="sample", markup=False)

    def read(self) -> dict[str, Any]:
        """Returns the first samples that pass the filter. Raises `UserError` for an invalid filter."""
        given = parse_filter(self.filter).model_dump()
        if self._shown_kind:
            given["status"] = KINDS[self._shown_kind]
        if given["status"] == "eval" or given["eval_name"]:  # its steps are counted as in the table: ◇8 is after step 7
            given |= {end: given[end] - 1 for end in ("step_min", "step_max") if given[end] is not None}
        return samples(self.view.store, SampleQuery(**given, sort=self._order, limit=NUM_ROWS, facets=False))

    def show(self, found: dict[str, Any]) -> None:
        """Fills the table and keeps the cursor on its sample."""
        table = self.query_one(DataTable)
        chosen = self._chosen  # saved before the rows change, because the table then moves its cursor to the first row
        self._rows = found["rows"]
        if not table.columns:
            table.add_columns(*COLUMNS)
        table.clear()
        table.add_rows(map(_cells, self._rows))
        keys = [(row["attempt"], row["sample_id"]) for row in self._rows]
        what = f"{self._shown_kind} sample".strip()
        if keys:
            table.move_cursor(row=keys.index(chosen) if chosen in keys else 0)
        else:
            hint = "; e shows others" if self._shown_kind else ""
            passes = " passes the filter" if self.filter else " yet" if self.view.store.run.status == "live" else ""
            self.query_one("#sample", Static).update(Text(f"No {what}{passes}{hint}.", "dim"))
        first = f"{len(keys)} of " if found["total"] > len(keys) else ""
        self.query_one("#found", Static).update(f"{first}{found['total']:,} {what}s, {ORDERS[self._order]}")

    @property
    def _shown_kind(self) -> str:
        """The chosen kind, or "" if the filter selects by status or eval."""
        chooses = any(word.startswith(("status=", "eval_name=")) for word in self.filter.split())
        return "" if chooses else self._kind

    @on(DataTable.RowHighlighted)
    def row_chosen(self, event: DataTable.RowHighlighted) -> None:
        if not 0 <= event.cursor_row < len(self._rows):
            return
        row = self._rows[event.cursor_row]
        key = (row["attempt"], row["sample_id"])
        if key != self._chosen:
            self._chosen = key
            self.in_thread(lambda: detail(self.view.store, *key), self._show_sample, "sample")

    def action_sort(self) -> None:
        self._order = next_of(ORDERS, self._order)
        self.read_anew()

    def action_kind(self) -> None:
        """Switches to the next kind: training, evals, both."""
        self._kind = next_of(KINDS, self._kind)
        self.read_anew()

    def action_follow(self) -> None:
        """Moves to the newest sample."""
        self._order = next(iter(ORDERS))
        self.read_anew()

    def read_anew(self) -> None:
        self._chosen = None
        super().read_anew()

    def _show_sample(self, sample: dict[str, Any]) -> None:
        self.query_one("#sample", Static).update(draw_sample(sample))
        self.query_one("#conversation", VerticalScroll).scroll_home(animate=False)


def _cells(row: dict[str, Any]) -> list[Text]:
    """Returns a cell for each of `COLUMNS`, with texts left-aligned and numbers right-aligned."""
    cells = [
        Text(single_line(row[name])) if name in TEXTS else Text(number(row[name], 3), justify="right")
        for name in COLUMNS.values()
    ]
    if row["eval_name"] and row["step"] is not None:  # as in the pages: after how many steps
        cells[list(COLUMNS.values()).index("step")] = Text(f"◇{number(row['step'] + 1)}", justify="right")
    return cells


def draw_sample(sample: dict[str, Any]) -> RenderableType:
    """Renders a sample: its numbers, prompt, turns with tool calls, and gold answers."""
    numbers = {
        "reward": number(sample["reward"]), "advantage": number(sample["advantage"]),
        "tokens": number(sample["completion_tokens"]), "stopped by": single_line(sample["stop_reason"]),
        "versions": f"{sample['start_version']} to {sample['end_version']}", "server": number(sample["server"]),
    }  # fmt: skip
    numbers |= {single_line(name): number(value) for name, value in sample["metrics"].items()}
    head = Text("   ").join(Text.assemble((f"{name} ", "dim"), value) for name, value in numbers.items())
    why = f" ({single_line(sample['reason'])})" if sample["reason"] else ""
    step = f"step {number(sample['step'])}"
    if sample["eval_name"] and sample["step"] is not None:
        step = f"eval {single_line(sample['eval_name'])} after {pluralize(sample['step'] + 1, 'step')}"
    title = (single_line(sample["sample_id"]), single_line(sample["environment"]), step)
    parts: list[RenderableType] = [Text("  ".join((*title, f"{sample['status']}{why}")), "bold"), head]
    if sample["failure_message"]:
        parts += [Text(), safe(sample["failure_message"], "yellow")]
    for message in sample["messages"]:
        parts += [Text(), Text(single_line(message["role"]), ROLES.get(message["role"], "bold"))]
        parts.append(safe(message.get("content")))
    said: dict[int, list[RenderableType]] = {}
    """The rendered lines of each turn."""
    answers = 0
    for turn in sample["turns"]:
        role = turn["role"] or ""
        shown = f"{role} ({kind})" if (kind := turn["turn_type"]) else role
        own = said[turn["turn"]] = [Text(), Text(single_line(shown), ROLES.get(role, "bold")), safe(turn["text"])]
        if is_answer(turn):
            own += [_call(call) for call in sample["tool_calls"] if call["turn"] == answers]
            answers += 1
    if len(sample["conversations"]) < 2:
        parts += chain.from_iterable(said.values())
    for chat in sample["conversations"] if len(sample["conversations"]) > 1 else ():
        heading = Text.assemble((single_line(chat["name"]), "bold reverse"), f"  {single_line(chat['about'])}")
        lines = Group(Text(), heading, *chain.from_iterable(said[turn] for turn in chat["turns"]))
        parts.append(Padding(lines, (0, 0, 0, INDENT * chat["depth"])))
    for name, value in sample["golden"].items():
        parts += [Text(), Text.assemble((f"gold {single_line(name)}: ", "dim"), safe(value))]
    return Group(*parts)


def _call(call: dict[str, Any]) -> Text:
    name, asked, answered, error = (single_line(call[key]) for key in ("name", "arguments", "result", "error"))
    seconds = number(call["seconds"], 2)
    return Text(f"  {name} {asked} → {error or answered} ({seconds} s)", "yellow" if error else "dim")
