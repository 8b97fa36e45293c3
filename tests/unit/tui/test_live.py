"""`telescope train` shows the overview of its run on a terminal of any size, and lines in a pipe."""

import io
import math
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from telescope.dashboard.registry import Registry
from telescope.dashboard.runs import health_of
from telescope.errors import InfrastructureError, RunError
from telescope.orchestrator.status import Interrupted, RunStatus, StepSummary
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run
from telescope.testing.replay import Replay
from telescope.tui.live import HINT, LiveView, phases, step_line
from telescope.tui.overview import draw, read_overview
from telescope.tui.text import clock

CONTROL = "\x1b[2J\x1b]0;title\x07\x9b1m\x08"


def summary(step: int, **values: float) -> StepSummary:
    numbers = {
        "reward_mean": 0.1234, "reward_trained": 0.4321, "seconds": 1.5, "staleness_mean": 0.75,
        "tokens_per_second": 34567.0, "kl_inference": 1e-4, "grad_norm": 0.3, "waited_share": 0.13,
    }  # fmt: skip
    return StepSummary(step=step, **{**numbers, **values})


def status_after(num_steps: int, total: int = 1000) -> RunStatus:
    status = RunStatus("demo", total, phase="training", step=num_steps)
    status.history.extend(summary(step) for step in range(num_steps))
    return status


def drawn(run_dir: Path, width: int, height: int | None = None) -> str:
    registry = Registry([run_dir])
    out = io.StringIO()
    found = read_overview(registry, next(iter(registry.stores())))
    Console(file=out, width=width, force_terminal=False).print(draw(found, width, height))
    return out.getvalue()


def shown(status: RunStatus, width: int = 400, *, is_terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, height=40, force_terminal=is_terminal, color_system=None)
    view = LiveView(console, watch=lambda run_dir: f"tool ui {run_dir}")
    view.start(status)
    view.stop()
    return out.getvalue()


@pytest.fixture(scope="module")
def live_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that has ended 20 of 50 steps, and says what it does."""
    folder = tmp_path_factory.mktemp("runs") / "live"
    status = RunStatus("live", 50, phase="training", step=20, num_generating=7, num_slots=8, num_discarded_groups=3)
    status.eval_done, status.eval_total = 10, 500
    for server in range(8):
        status.components[f"server {server}"] = f"loading {CONTROL}" + "something with a long name " * 8
    with Replay(folder, num_steps=50) as replay:
        replay.recorder.now = status.now
        replay.write_until(replay.step_end(19))
        replay.recorder.flush()
        yield folder


def test_a_warning_of_the_log_is_a_line_in_a_pipe_and_an_alert_on_a_terminal() -> None:
    status = status_after(1)
    status.show("Training waited 8 s\nat this place")
    assert "\nTraining waited 8 s\n" in shown(status)
    assert status.unrecorded() == []


def test_the_overview_has_the_sentences_of_the_dashboard_and_what_the_run_does(live_run: Path) -> None:
    registry = Registry([live_run])
    frame = drawn(live_run, 120)
    one_line = " ".join(frame.split())
    for sentence in health_of(next(iter(registry.stores().values())))["verdict"]:
        assert sentence["text"] in one_line
    for words in (
        "training", "20 of 50 steps", " left", "10 of 500 samples", "Reward", "step 19", "tokens/s",
        "7 of 8 slots · 3 discarded", "server 7", "Alerts",
    ):  # fmt: skip
        assert words in frame, words
    (point,) = {row[0] for row in Run(live_run).sql("select max(step) from steps").rows}
    assert f"step {point}" in frame, "steps have the numbers of the record"


@pytest.mark.parametrize(
    ("status", "words"), [("live", ("training", "1 open, 1 resolved")), ("dead", ("stopped unexpectedly", "2 closed"))]
)
def test_status_and_alerts_have_the_words_of_the_pages(live_run: Path, status: str, words: tuple[str, ...]) -> None:
    registry = Registry([live_run])
    found = read_overview(registry, next(iter(registry.stores())))
    found["now"], alert = {}, {"title": "T", "text": "", "advice": None, "level": "error", "step": 1, "count": 1}
    found["health"]["alerts"] = [{**alert, "resolved": is_resolved} for is_resolved in (True, False)]
    found["about"]["info"] |= {"status": status, "live": status == "live"}
    Console(file=(out := io.StringIO()), width=100).print(draw(found, 100))
    assert all(text in out.getvalue() for text in words)


@pytest.mark.parametrize("width", range(60, 161, 20))
def test_every_width_shows_progress_reward_and_alerts(live_run: Path, width: int) -> None:
    frame = drawn(live_run, width)
    assert all(len(line) <= width for line in frame.splitlines())
    for words in ("20 of 50 steps", "Reward", "eval", "Alerts"):
        assert words in frame
    assert not set(CONTROL[0] + "\x07\x9b\x08") & set(frame)


def test_a_low_terminal_shows_health_activities_and_alerts_before_the_rest(live_run: Path) -> None:
    lines = drawn(live_run, 100, 24).splitlines()
    assert any(line.startswith("Alerts") for line in lines[:24])
    assert any("and 6 more" in line for line in lines), "of eight servers, two are shown"


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.7e308])
def test_numbers_that_are_not_finite_are_drawn(tmp_path: Path, bad: float) -> None:
    with Recorder(tmp_path / "run") as recorder:
        begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=0, num_steps=5)
        for step, value in enumerate((0.5, bad, -bad, 0.25)):
            metrics = {"reward/all_groups/mean": value, "entropy": value}
            recorder.write("steps", {"step": step, "started_at": 1.0, "ended_at": 2.0, "metrics": metrics})
        recorder.flush()
        assert "4 of 5 steps" in drawn(tmp_path / "run", 80)
    assert step_line(summary(3, reward_mean=bad, seconds=bad, kl_inference=bad), 1000)


def test_a_record_that_cannot_be_read_leaves_the_phase_and_is_logged_once(
    live_run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("telescope.tui.overview.read_overview", Mock(side_effect=OSError("no such disk")))
    caplog.set_level("INFO", "telescope.tui.live")
    assert "saving" in shown(RunStatus("demo", 50, phase="saving", run_dir=str(live_run)), is_terminal=True)
    assert caplog.messages == ["the record of the run cannot be shown: OSError('no such disk')"]


def test_a_terminal_shows_the_run_its_commands_and_what_no_alert_says(live_run: Path) -> None:
    status = RunStatus("demo", 50, phase="training", run_dir=str(live_run))
    status.report("an alert", "log", "warning")
    status.messages.append("the tracker is offline")
    text = shown(status, 120, is_terminal=True)
    for words in ("telescope · demo", f"tool ui {live_run}", HINT, "20 of 50 steps", "· the tracker is offline"):
        assert words in text.replace("\n", "")
    assert "· an alert" not in text


def test_on_a_terminal_the_last_state_stays_on_the_screen(tmp_path: Path) -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, width=100, force_terminal=True))
    status = RunStatus("demo", 10, run_dir=str(tmp_path))
    view.start(status)
    status.phase = "finished 10 steps"
    view.stop()
    assert "finished 10 steps" in out.getvalue()


def test_without_a_terminal_a_run_is_printed_as_lines() -> None:
    status = status_after(2)
    status.messages.append("[/odd] note")
    lines = shown(status).splitlines()
    assert lines[0] == "Watch it with tool ui "
    assert lines[1].endswith("training")
    assert lines[2] == "[/odd] note"
    assert lines[3].startswith("step 0 (1 of 1000)  reward 0.123 (0.432 trained)  34,567 tokens/s  ")
    assert lines[4].startswith("step 1 (2 of 1000)  ")


def test_a_step_is_printed_before_the_phase_that_follows_it() -> None:
    status = status_after(2)
    status.phase = "writing the last checkpoint"
    lines = [line.split("  ")[0].split("] ")[-1] for line in shown(status).splitlines()[1:]]
    assert lines == ["training", "step 0 (1 of 1000)", "step 1 (2 of 1000)", "writing the last checkpoint"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_sequences_in_what_a_run_reports_do_not_reach_the_terminal(tmp_path: Path, is_terminal: bool) -> None:
    status = RunStatus(f"na{CONTROL}me", 10, phase=f"pha{CONTROL}se", run_dir=str(tmp_path))
    status.messages.append(f"mess{CONTROL}age")
    text = shown(status, is_terminal=is_terminal)
    assert "phase" in text and "message" in text
    assert "\x1b[2J" not in text and not set("\x07\x9b\x08") & set(text)


def test_the_clock_counts_hours_only_when_there_are_any() -> None:
    moments = (None, math.nan, 0, 61, 3723.9, 90_061)
    assert [clock(seconds) for seconds in moments] == ["-", "-", "0:00", "1:01", "1:02:03", "1 day, 1:01:01"]


@pytest.mark.parametrize(("error", "raised", "words"), [
    (Interrupted(), SystemExit, "Interrupted; every process was ended. The same command continues"),
    (InfrastructureError("a server is gone"), RunError, "the evaluation could not continue: a server is gone. The"),
])  # fmt: skip
def test_a_command_that_shows_phases_ends_with_what_to_do(
    error: Exception, raised: type[BaseException], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = RunStatus("eval", 0, phase="measuring")
    status.messages.append("a message")

    def work() -> None:
        with phases("evaluation", ["a note"], ". The same command continues") as view:
            view.start(status)
            raise error

    with pytest.raises(raised) as caught:
        work()
    shown = capsys.readouterr().err
    assert shown.startswith("· a note") and "] measuring" in shown and "a message" not in shown
    assert words in shown + str(caught.value)
