"""Each page of the terminal view shows the run, by keys alone."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tui.conftest import NUM_SERVERS, NUM_STEPS, Open
from textual.widgets import DataTable, Footer, OptionList, RichLog, Tabs

from telescope.dashboard.events import TableSizes
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run
from telescope.testing.replay import Replay
from telescope.tui.app import RunApp
from telescope.tui.pages import OverviewPage
from telescope.tui.rollouts import COLUMNS


def down_of(run: Path) -> str:
    """What the alert of the killed server says first: `server 1 is down`."""
    (message,) = Run(run).sql("select message from alerts where message like '% is down: %'").rows[0]
    return str(message).partition(":")[0]


async def test_the_overview_says_how_the_run_is_and_how_far(replayed: Path, open_view: Open) -> None:
    async with open_view(replayed) as view:
        shown = view.text("#about")
    assert "countdown: " in shown and "before training" in shown
    assert "finished" in shown and f"{NUM_STEPS} of {NUM_STEPS} steps" in shown
    for word in ("Reward", "Trainer waits", "Entropy", "▁", "Alerts", down_of(replayed), "models/tiny-mixed"):
        assert word in shown


async def test_a_read_that_ends_after_the_application_shows_nothing(
    replayed: Path, open_view: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    shown: list[bool] = []
    async with open_view(replayed) as view:
        view.app.page.in_thread(lambda: ended.wait(30), shown.append, "late")
        worker = next(one for one in view.app.workers if one.group.endswith("late"))
        with monkeypatch.context() as patch:
            patch.setattr(RunApp, "is_running", False)
            ended.set()
            await worker.wait()
    assert not shown


async def test_a_disk_that_fails_for_a_moment_does_not_end_the_view(
    replayed: Path, open_view: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("stale file handle")

    async with open_view(replayed) as view:
        with monkeypatch.context() as patch:
            patch.setattr(Run, "num_rows", fail)
            patch.setattr(OverviewPage, "read", fail)
            assert "steps" not in TableSizes(view.app.store.run).read()
            view.app.page.refresh_data()
            await view.app.workers.wait_for_complete()
            assert [one.message for one in view.app._notifications] == ["stale file handle"]
        view.app.page.refresh_data()
        await view.app.workers.wait_for_complete()
        assert "countdown: " in view.text("#about")


async def test_a_metric_is_chosen_by_words_and_plotted_with_its_newest_value(replayed: Path, open_view: Open) -> None:
    async with open_view(replayed) as view:
        await view.press("2")
        assert view.text("#plots").startswith("reward/all_groups/mean")
        await view.press("slash")
        await view.write("timing total")
        names = [option.id for option in view.app.query_one(OptionList).options]
        assert names and all("timing" in name and "total" in name for name in names if name)
        shown = view.text("#plots")
    newest = Run(replayed).table("steps").to_pylist()[-1]
    assert shown.startswith(f"{names[0]}  {dict(newest['metrics'])[names[0]]:.4g}")
    assert "step 0" in shown and shown.rstrip().endswith(str(NUM_STEPS - 1))


async def test_a_kept_plot_stays_beside_the_next_one(replayed: Path, open_view: Open) -> None:
    async with open_view(replayed) as view:
        await view.press("2", "space", "j", "j")
        shown = view.text("#plots")
        assert "reward/all_groups/mean" in shown and "(kept)" in shown and "\nentropy" in shown
        await view.press("k", "k", "space", "j")
        assert "(kept)" not in view.text("#plots")


async def test_a_filter_of_samples_finds_them_and_the_cursor_shows_their_conversation(
    replayed: Path, open_view: Open
) -> None:
    # A right answer has called the tool.
    where = "step between 2 and 9 and environment = 'calculator_agent' and status = 'kept' and reward >= 1"
    ((expected,),) = Run(replayed).sql(f"select count(*) from samples where {where}").rows
    assert expected > 0
    async with open_view(replayed) as view:
        await view.press("3", "slash")
        await view.write("step=2..9 environment=calculator_agent status=kept reward=1..")
        assert view.text("#found").startswith(f"{expected} samples")
        assert view.app.query_one(DataTable).row_count == expected
        shown = view.text("#sample")
    for word in ("calculator_agent  step", "user", "assistant", "calculate {", "→"):
        assert word in shown
    assert "tool" in shown and "gold answer" in shown


async def test_samples_are_searched_and_sorted(replayed: Path, open_view: Open) -> None:
    async with open_view(replayed) as view:
        await view.press("3", "slash")
        await view.write("-> 12")
        everything = view.text("#found")
        await view.press("s")
        assert "highest reward first" in view.text("#found")
        assert "-> 12" in view.text("#sample")
        rewards = [row["reward"] for row in view.app.query_one("#rollouts")._rows]  # type: ignore[attr-defined]
        assert rewards == sorted(rewards, reverse=True)
        await view.press("slash")
        await view.write("nothing has this")
        assert "No training sample passes" in view.text("#sample")
    assert "training samples, newest first" in everything


async def test_training_samples_are_not_buried_under_those_of_evals(replayed: Path, open_view: Open) -> None:
    counts = dict(Run(replayed).sql("select status = 'eval', count(*) from samples group by all").rows)
    assert counts[True] > counts[False] / 2
    async with open_view(replayed) as view:
        shown = []
        for key in ("3", "e", "e", "e"):
            await view.press(key)
            statuses = {row["status"] for row in view.app.query_one("#rollouts")._rows}  # type: ignore[attr-defined]
            shown.append((view.text("#found").replace("300 of ", "").strip(), "eval" in statuses, "kept" in statuses))
        await view.press("slash")
        await view.write("status=eval")
        assert view.text("#found").startswith(f"300 of {counts[True]:,} samples, newest")
    total = counts[True] + counts[False]
    assert shown == [
        (f"{counts[False]:,} training samples, newest first", False, True),
        (f"{counts[True]:,} eval samples, newest first", True, False),
        (f"{total:,} samples, newest first", True, True),
        (f"{counts[False]:,} training samples, newest first", False, True),
    ]


async def test_a_filter_by_step_finds_an_eval_by_the_number_in_the_table(tmp_path: Path, open_view: Open) -> None:
    with Recorder(tmp_path / "run") as recorder:
        begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=0, num_steps=9)
        for step in (-1, 3, 7):
            row = {"sample_id": f"e{step}", "step": step, "status": "eval", "eval_name": "held", "group_id": -1}
            recorder.write("samples", row)
    async with open_view(tmp_path / "run") as view:
        await view.press("3")
        assert view.text("#sample").startswith("No training sample yet; e shows others.")
        await view.press("e")
        for text, shown in (("step=4", "◇4"), ("step=0", "◇0"), ("step=8.. eval_name=held", "◇8")):
            await view.press("slash")
            await view.write(text)
            table = view.app.screen.query_one(DataTable)
            assert (table.row_count, str(table.get_cell_at((0, 0)))) == (1, shown)
            assert f" eval held after {shown[1:]} steps" in view.text("#sample")


async def test_a_narrow_terminal_shows_the_first_columns_of_samples_and_scrolls_to_the_others(
    replayed: Path, open_view: Open
) -> None:
    async with open_view(replayed, size=(80, 24)) as view:
        await view.press("3", "j")
        table = view.app.query_one(DataTable)
        assert [column.label.plain for column in table.ordered_columns] == list(COLUMNS)
        chosen = view.text("#sample")
        await view.press(*["right"] * 10)
        assert table.scroll_x > 0 and view.text("#sample") == chosen


async def test_each_page_fits_a_terminal_of_80_columns(replayed: Path, open_view: Open) -> None:
    async with open_view(replayed, size=(80, 24)) as view:
        for key in "1234":
            await view.press(key)
            assert view.app.query_one(Footer).virtual_size.width <= 80
            tab = view.app.query_one(Tabs).active_tab
            assert tab is not None and tab.label_text == f"{key} {view.app.page.id}"
            assert view.app.query_one("#tabs-list").virtual_size.width <= 80


async def test_a_prompt_is_shown_as_its_messages_with_each_role_once(replayed: Path, open_view: Open) -> None:
    async with open_view(replayed) as view:
        await view.press("3", "slash")
        await view.write("environment=countdown")
        shown = view.text("#sample").splitlines()
    roles = [line for line in shown if line in ("prompt", "system", "user", "assistant")]
    assert roles == ["user", "assistant"]
    assert not any("<|im_" in line for line in shown)


async def test_a_wrong_filter_names_the_fix(replayed: Path, open_view: Open) -> None:
    async with open_view(replayed) as view:
        await view.press("3", "slash")
        await view.write("step=abc")
        (problem,) = view.app._notifications
        assert "Write step=40" in problem.message


async def test_log_lines_are_chosen_by_level_component_and_text(replayed: Path, open_view: Open) -> None:
    async with open_view(replayed) as view:
        await view.press("4")
        assert "weights of version 0 verified" in view.text("RichLog")
        await view.press("e", "e")
        lines = view.text("RichLog").splitlines()
        assert lines and any(down_of(replayed) in line for line in lines)
        assert not any(" info " in line for line in lines)
        await view.press("e", "e", "slash")
        await view.write("component=inference-1 max model len")
        (line,) = view.text("RichLog").strip().splitlines()
        assert "Using max model len 192" in line
        await view.press("slash")
        await view.write("component=inference max model len")
        assert len(view.text("RichLog").strip().splitlines()) == NUM_SERVERS


async def test_scrolling_up_in_the_logs_stops_following_until_the_end_is_in_view(
    tmp_path: Path, open_view: Open
) -> None:
    with Replay(tmp_path / "live", num_steps=50) as replay:

        def log(message: str) -> None:
            line = {"time": time.time(), "level": "INFO", "component": "x", "message": message}
            replay.recorder.write("logs", line)
            replay.recorder.flush()

        for place in range(100):
            log(f"line {place}")
        async with open_view(tmp_path / "live") as view:
            await view.press("4")
            lines = view.app.query_one(RichLog)
            assert lines.is_vertical_scroll_end and ", follows;" in view.text("#log-state")
            await view.press("pageup")
            await view.animations()
            before = lines.scroll_offset.y
            log("new")
            await view.poll()
            assert lines.lines[-1].text.strip().endswith("new")
            assert lines.scroll_offset.y == before and "stands still" in view.text("#log-state")
            await view.press("end")
            await view.animations()
            assert ", follows;" in view.text("#log-state")
            for place in range(600):  # more than are read anew
                log(f"newer {place}")
            await view.poll()
            assert lines.is_vertical_scroll_end
            await view.press("k")
            await view.animations()
            assert "stands still" in view.text("#log-state")
            await view.press("e")
            await view.animations()
            assert lines.is_vertical_scroll_end and ", follows;" in view.text("#log-state"), "it was read anew"
            await view.press("f")
            assert "stands still" in view.text("#log-state")
            await view.press("f")
            assert lines.is_vertical_scroll_end and ", follows;" in view.text("#log-state")


async def test_a_live_run_grows_on_the_page_that_is_seen(tmp_path: Path, open_view: Open) -> None:
    with Replay(tmp_path / "live", num_steps=50) as replay:
        replay.write_step(2)
        replay.recorder.flush()
        async with open_view(tmp_path / "live") as view:
            assert "3 of 50 steps" in view.text("#about") and "last 3 steps" in view.text("#about")
            await view.press("4", "1")
            replay.write_step(3)
            line = {"level": "ERROR", "component": "x"}
            replay.recorder.write("logs", {**line, "time": time.time(), "message": "newest"})
            replay.recorder.flush()
            await view.poll()
            assert "4 of 50 steps" in view.text("#about")
            await view.press("4")
            assert view.text("RichLog").strip().endswith("newest")
            before = view.text("RichLog").count("\n")
            replay.recorder.write("logs", {**line, "time": time.time(), "message": "one more"})
            replay.recorder.flush()
            await view.poll()
            assert view.text("RichLog").count("\n") == before + 1


async def test_new_rows_are_shown_although_reading_takes_longer_than_a_tick(
    tmp_path: Path, open_view: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def read_slowly(self: Any) -> Any:
            time.sleep(1.5 * tick)
            return read(self)

        return read_slowly

    tick = 0.2
    monkeypatch.setattr("telescope.tui.app.LIVE_SECONDS", tick)
    with Replay(tmp_path / "live", num_steps=50) as replay:
        replay.write_step(0)
        replay.recorder.flush()
        async with open_view(tmp_path / "live") as view:
            monkeypatch.setattr(TableSizes, "read", slow(TableSizes.read))
            monkeypatch.setattr(OverviewPage, "read", slow(OverviewPage.read))
            replay.write_step(1)
            replay.recorder.flush()
            until = time.monotonic() + 30
            while "2 of 50 steps" not in view.text("#about"):
                assert time.monotonic() < until
                await asyncio.sleep(0.05)


async def test_a_run_without_steps_is_shown(tmp_path: Path, open_view: Open) -> None:
    with Recorder(tmp_path / "new") as recorder:
        begin_run(recorder, name="new", config_hash="c", config_json="{}", first_step=0, num_steps=5)
        recorder.flush()
        async with open_view(tmp_path / "new", size=(60, 20)) as view:
            assert "No step has ended yet." in view.text("#about")
            await view.press("2")
            assert "No metric yet." in view.text("#plots")
            await view.press("3")
            assert view.text("#found").startswith("0 training samples")
            await view.press("4")
            assert view.text("RichLog").strip() == ""


HOSTILE = "\x1b]0;title\x07\x1b[31mred \x9b2J[bold]markup[/bold] \u202egnitrats\r\b<script>"


async def test_texts_of_a_run_cannot_control_the_terminal(tmp_path: Path, open_view: Open) -> None:
    with Recorder(tmp_path / "hostile") as recorder:
        begin_run(recorder, name=HOSTILE, config_hash="c", config_json="{}", first_step=0, num_steps=5)
        named = {"sample_id": "0-0", "environment": HOSTILE, "status": "kept", "stop_reason": HOSTILE}
        messages = json.dumps([{"role": HOSTILE, "content": HOSTILE}])
        recorder.write("prompts", {"prompt_key": "p", "environment": HOSTILE, "text": HOSTILE, "messages": messages})
        recorder.write("samples", {**named, "group_id": 0, "sample_index": 0, "step": 0, "prompt_key": "p",
                                   "golden": {HOSTILE: HOSTILE}, "metrics": {HOSTILE: 1.0},
                                   "failure_message": HOSTILE})  # fmt: skip
        turn = {"sample_id": "0-0", "turn": 0, "role": HOSTILE, "text": HOSTILE}
        recorder.write("turns", turn)
        recorder.write("tool_calls", {"sample_id": "0-0", "turn": 0, "call": 0, "name": HOSTILE, "arguments": HOSTILE})
        recorder.write("logs", {"time": 1.0, "level": "ERROR", "component": HOSTILE, "message": HOSTILE * 3})
        recorder.write("alerts", {"time": 1.0, "level": "error", "kind": "log", "message": HOSTILE, "advice": HOSTILE})
        recorder.write("steps", {"step": 0, "started_at": 1.0, "ended_at": 2.0, "metrics": {HOSTILE: 1.0}})
        recorder.flush()
        async with open_view(tmp_path / "hostile") as view:
            shown = [view.text("#about")]
            for key, selector in (("2", "#plots"), ("3", "#sample"), ("4", "RichLog")):
                await view.press(key)
                shown.append(view.text(selector))
    for text in shown:
        assert not set(text) & set("\x1b\x07\x9b\x08\r\u202e")
        assert "[bold]markup[/bold]" in text, "it is shown as it is, and not read as markup"


async def test_a_text_of_ten_megabytes_is_cut(tmp_path: Path, open_view: Open) -> None:
    with Recorder(tmp_path / "long") as recorder:
        begin_run(recorder, name="long", config_hash="c", config_json="{}", first_step=0, num_steps=5)
        row = {"sample_id": "0-0", "group_id": 0, "sample_index": 0, "step": 0, "status": "kept"}
        recorder.write("turns", {"sample_id": "0-0", "turn": 0, "role": "assistant", "text": "x" * 10_000_000})
        recorder.write("samples", row)
        recorder.write("logs", {"time": 1.0, "level": "INFO", "component": "driver", "message": "y" * 10_000_000})
        recorder.flush()
        async with open_view(tmp_path / "long") as view:
            await view.press("3")
            assert "more characters" in view.text("#sample")
            await view.press("4")
            assert "more characters" in view.text("RichLog")
