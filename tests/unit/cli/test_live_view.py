"""The live view draws every state of a run at every width, with the main numbers."""

from __future__ import annotations

import io
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from telescope.cli.live_view import SPARKS, LiveView, clock, render, sparkline, step_line
from telescope.orchestrator.status import RunStatus, StepSummary

WIDTHS = range(60, 121, 10)
finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


def drawn(status: RunStatus, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(render(status, width))
    return out.getvalue()


def summary(step: int, **values: float) -> StepSummary:
    numbers = {
        "reward_mean": 0.1234, "reward_trained": 0.4321, "seconds": 1.5, "staleness_mean": 0.75,
        "tokens_per_second": 34567.0, "kl_inference": 1e-4, "grad_norm": 0.3, "entropy": 1.25, "waited_share": 0.13,
    }  # fmt: skip
    return StepSummary(step=step, **{**numbers, **values})


def status_after(num_steps: int, total: int = 1000) -> RunStatus:
    status = RunStatus("demo", total, phase="training", step=num_steps)
    status.history.extend(summary(step) for step in range(num_steps))
    return status


@pytest.mark.parametrize("width", WIDTHS)
def test_a_started_run_is_drawn(width: int) -> None:
    frame = drawn(RunStatus("demo", 100), width)
    assert "starting" in frame
    assert "no step finished yet" in frame
    assert "left -" in frame


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_steps", [2, 999])
def test_every_width_shows_step_reward_speed_staleness_and_time_left(num_steps: int, width: int) -> None:
    frame = drawn(status_after(num_steps), width)
    assert f"step {num_steps}/1000" in frame
    for name in ("step", "reward", "tokens/s", "staleness", "seconds"):
        assert re.search(rf"\b{re.escape(name)}\b", frame)
    for number in ("0.123", "34,567", "0.75", "1.50"):
        assert number in frame
    assert re.search(r"left \d+:\d\d", frame)
    assert all(len(line) <= width for line in frame.splitlines())


def test_the_reward_of_all_samples_comes_first_and_that_of_the_trained_ones_is_named() -> None:
    frame = drawn(status_after(2), 120)
    assert re.search(r"reward 0\.123 .* from 0\.123, trained 0\.432", frame)
    header, first, second = (
        line.split()[1:4] for line in frame.splitlines() if re.search(r"tokens/s +stal|34,567", line)
    )
    assert (header, first, second) == (["step", "reward", "trained"], ["1", "0.123", "0.432"], ["2", "0.123", "0.432"])
    assert step_line(summary(1), 60).startswith("step 2/60  reward 0.123 (0.432 trained)  ")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_long_run_with_everything_at_once_is_drawn(width: int) -> None:
    status = status_after(12_345, total=123_456)
    status.phase = "a phase that says very much about what it is doing " * 3
    status.eval_done, status.eval_total = 10, 500
    status.num_slots = status.num_generating = 4096
    for part in ("trainer", "dispatch", "batches", "prompts", *(f"server {index}" for index in range(8))):
        status.set_component(part, "waiting for something that has a long name " * 4)
    for index in range(10):
        status.messages.append(f"message {index} " * 12)
    frame = drawn(status, width)
    assert "eval 10/500" in frame
    assert re.search(r"left \d+:\d\d", frame)
    assert all(len(line) <= width for line in frame.splitlines())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("letter", ["r", "語"])
def test_a_long_path_is_shortened_before_the_hint_to_end_the_run(letter: str, width: int) -> None:
    status = RunStatus("demo", 100, run_dir=f"/home/{letter * 100}/runs/the-run")
    last = drawn(status, width).splitlines()[-1]
    assert "runs/the-run · Ctrl-C ends it cleanly" in last
    assert "…" in last
    assert cell_len(last) == width
    status.run_dir = "/runs/the-run"
    assert " /runs/the-run · Ctrl-C ends it cleanly" in drawn(status, width).splitlines()[-1]


def test_untrusted_text_is_not_read_as_markup() -> None:
    status = RunStatus("[red]demo[/]", 10, phase="[bold]phase")
    status.set_component("server 0", "(EngineCore pid=7) INFO [core.py:12] \x1b[1;36mloading\x1b[0m [/model]")
    status.messages.append("[/nothing] was open")
    frame = drawn(status, 120)
    for text in ("[red]demo[/]", "[bold]phase", "INFO [core.py:12] loading [/model]", "[/nothing] was open"):
        assert text in frame


CONTROL = "\x1b[2J\x1b]0;title\x07\x9b1m\x08"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_sequences_in_what_a_run_reports_do_not_reach_the_terminal(is_terminal: bool) -> None:
    status = RunStatus(f"na{CONTROL}me", 10, phase=f"pha{CONTROL}se", run_dir=f"/runs{CONTROL}/here")
    status.set_component(f"server{CONTROL}", f"doi{CONTROL}ng")
    status.messages.append(f"mess{CONTROL}age")
    out = io.StringIO()
    if is_terminal:
        Console(file=out, width=120).print(render(status, 120))
        assert "name" in out.getvalue() and "/runs/here" in out.getvalue() and "doing" in out.getvalue()
    else:
        view = LiveView(Console(file=out, width=400, force_terminal=False))
        view.start(status)
        view.stop()
    assert "phase" in out.getvalue() and "message" in out.getvalue()
    assert not set("\x1b\x07\x9b\x08") & set(out.getvalue())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_drawn(bad: float) -> None:
    status = status_after(3)
    status.history.append(
        summary(3, reward_mean=bad, seconds=bad, kl_inference=bad, grad_norm=bad, tokens_per_second=bad)
    )
    assert "step 3/1000" in drawn(status, 80)
    assert step_line(status.history[-1], 1000)


@given(st.lists(finite, max_size=60), st.integers(-2, 40))
def test_a_sparkline_is_at_most_as_wide_as_asked_and_made_of_blocks(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), max(width, 0))
    assert set(line) <= set(SPARKS)


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=20))
def test_a_sparkline_orders_its_blocks_as_its_values(values: list[int]) -> None:
    line = sparkline(values, len(values))
    for left, right in zip(range(len(values) - 1), range(1, len(values)), strict=True):
        if values[left] <= values[right]:
            assert SPARKS.index(line[left]) <= SPARKS.index(line[right])
    if len(set(values)) > 1:
        assert line[values.index(min(values))] == SPARKS[0]
        assert line[values.index(max(values))] == SPARKS[-1]


def test_a_sparkline_has_a_gap_for_unknown_values() -> None:
    assert sparkline([0.0, math.nan, 1.0], 3) == f"{SPARKS[0]} {SPARKS[-1]}"
    assert sparkline([0.5, 0.5], 2) == SPARKS[0] * 2


def test_the_clock_counts_hours_only_when_there_are_any() -> None:
    assert [clock(s) for s in (None, math.nan, 0, 61, 3723.9)] == ["-", "-", "0:00", "1:01", "1:02:03"]


def test_without_a_terminal_a_run_is_printed_as_lines() -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, width=400, force_terminal=False))
    status = status_after(2)
    status.messages.append("[/odd] note")
    view.start(status)
    view.stop()
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("training")
    assert lines[1] == "[/odd] note"
    assert [line.split("  ")[0] for line in lines[2:]] == ["step 1/1000", "step 2/1000"]


def test_a_step_is_printed_before_the_phase_that_follows_it() -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, width=400, force_terminal=False))
    status = status_after(2)
    status.phase = "writing the last checkpoint"
    view.start(status)
    view.stop()
    lines = [line.split("  ")[0].split("] ")[-1] for line in out.getvalue().splitlines()]
    assert lines == ["training", "step 1/1000", "step 2/1000", "writing the last checkpoint"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_command_that_opens_the_run_is_shown_while_it_is_live(is_terminal: bool) -> None:
    out = io.StringIO()
    view = LiveView(
        Console(file=out, width=100, force_terminal=is_terminal), watch=lambda run_dir: f"tool ui {run_dir}"
    )
    view.start(RunStatus("demo", 10, run_dir="runs/demo"))
    view.stop()
    assert "tool ui runs/demo" in out.getvalue()


def test_on_a_terminal_the_last_state_stays_on_the_screen() -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, width=100, force_terminal=True))
    status = RunStatus("demo", 10)
    view.start(status)
    status.phase = "finished 10 steps"
    view.stop()
    assert "finished 10 steps" in out.getvalue()
