"""Plots, filters and texts of the terminal view, without a terminal."""

import io
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from telescope.cli.main import main
from telescope.errors import UserError
from telescope.tui.overview import curve
from telescope.tui.pages import LABEL_COLUMNS, plot
from telescope.tui.rollouts import parse_filter
from telescope.tui.text import LONGEST, number, safe


def lines_of(values: list[float], width: int = 60, height: int = 11) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(plot(values, range(len(values)), width, height))
    return out.getvalue().splitlines()


def test_a_plot_has_its_size_and_names_its_range_and_steps() -> None:
    lines = lines_of([float(value) for value in range(49)])
    assert len(lines) == 11 and {len(line.rstrip()) for line in lines[:-1]} == {60}
    assert [lines[row].split()[0] for row in (0, 9)] == ["48", "0"]
    assert lines[-1].split() == ["step", "0", "48"]


def test_a_rising_curve_goes_from_the_lower_left_to_the_upper_right() -> None:
    lines = [line[LABEL_COLUMNS + 1 :] for line in lines_of([float(value) for value in range(100)])[:-1]]
    first = [len(line) - len(line.lstrip()) for line in lines]
    assert first == sorted(first, reverse=True)
    assert first[0] > 40 and first[-1] == 0


@pytest.mark.parametrize("values", [[], [math.nan] * 2, [math.inf, math.nan]], ids=["none", "absent", "infinity"])
def test_nothing_finite_is_said_in_words(values: list[float]) -> None:
    assert lines_of(values) == ["no finite value yet"]


@pytest.mark.parametrize("values", [[2.0] * 5, [0.0], [1e299, -1e299], [math.nan, 1.0, math.nan, 3.0, 1e308]])
def test_any_range_is_drawn(values: list[float]) -> None:
    assert any("▁" <= cell <= "█" for line in lines_of(values)[:-1] for cell in line)


@given(st.lists(st.floats(), max_size=60), st.integers(1, 40))
def test_a_curve_in_a_line_is_as_wide_as_its_values_at_most(values: list[float], width: int) -> None:
    line = curve(values, width)
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(line or "")
    assert len(out.getvalue().strip()) == (min(len(values), width) if line else 0)


def test_a_curve_of_many_values_is_that_of_their_means() -> None:
    line = curve([0.0, 2.0, math.nan, 4.0] * 100, 2)
    assert line is not None and line.data == pytest.approx([2.25, 2.25], abs=0.05)
    whole = curve([1.0, math.nan, 3.0], 3)
    assert whole is not None and whole.data == [1.0, 2.0, 3.0], "a line replaces what is missing"


def test_a_filter_names_columns_and_searches_for_the_rest() -> None:
    found = parse_filter("step=40..50 status=kept,discarded reward=0..0.5 completion_tokens=12 two words a=b")
    assert (found.step_min, found.step_max) == (40, 50)
    assert (found.status, found.reward) == ("kept,discarded", "")
    assert found.range == ["reward=0..0.5", "completion_tokens=12..12"]
    assert found.search == "two words a=b"
    assert parse_filter("reward=1").reward == "1"
    assert parse_filter("reward=0.5.. total_tokens=..9").range == ["reward=0.5..", "total_tokens=..9"]
    assert [(f.step_min, f.step_max) for f in map(parse_filter, ("step=7", "step=7..", "step=..7"))] == [
        (7, 7), (7, None), (None, 7),
    ]  # fmt: skip


def test_a_wrong_step_is_refused() -> None:
    with pytest.raises(UserError, match=r"step='x' .* step=40\.\.50"):
        parse_filter("step=x")
    with pytest.raises(UserError, match=r"step='9{30}' "):
        parse_filter(f"step={'9' * 30}")


def test_texts_are_cut_and_numbers_are_short() -> None:
    assert safe("x" * (LONGEST + 5)).plain.endswith("(5 more characters)")
    assert safe(None).plain == ""
    numbers = [number(value) for value in (None, math.nan, 12345, 0.123456)]
    assert numbers == ["-", "-", "12,345", "0.1235"]


def test_without_a_terminal_the_command_names_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    assert main(["tui", str(tmp_path / "run")]) == 2
    assert "needs a terminal" in capsys.readouterr().err


def test_the_help_lists_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tui", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "1 2 3 4" in shown and "lowest level" in shown
