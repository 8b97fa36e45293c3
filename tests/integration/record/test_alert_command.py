"""`alert_command` gets every alert, one at a time, and can neither stop nor delay a run."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.processes import has_ended, wait_for

from telescope.record import alerts as alerts_module
from telescope.record.alerts import Alerts
from telescope.record.files import RunFiles
from telescope.record.reader import Run
from telescope.record.recorder import Recorder

ROW = {"time": 12.5, "level": "warning", "kind": "entropy", "message": "Entropy fell.", "step": 40}


def program(text: str) -> list[str]:
    """A command that runs a Python program, which can write to `out` and has `alert`."""
    head = "import json, os, sys, time; alert = json.load(sys.stdin); out = open(os.environ['OUT'], 'a', buffering=1)\n"
    return [sys.executable, "-c", head + text]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path / "out"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Alerts]]:
    """Starts the alerts of a run in `tmp_path / "run"`."""
    with Recorder(tmp_path / "run") as recorder:
        started = []

        def make(command: list[str], tell: Callable[[str], None] | None = None) -> Alerts:
            started.append(Alerts(recorder, command, "demo", tell))
            return started[-1]

        yield make
        for one in started:
            one.close()


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_command_gets_the_alert_as_json_and_in_variables_and_its_output_is_kept(
    tmp_path: Path, out: Path, start: Callable[..., Alerts]
) -> None:
    seen = "{k: v for k, v in os.environ.items() if k.startswith('TELESCOPE_ALERT')}"
    alerts = start(program(f"print(json.dumps([alert, {seen}]), file=out); print('sent')"))
    alerts.add({**ROW, "advice": None, "metrics": ["entropy"]})
    alerts.close()
    ((alert, variables),) = lines(out)
    run = {"run": "demo", "run_dir": str(tmp_path / "run"), "attempt": 1}
    assert alert == {**run, **ROW, "advice": None, "metrics": ["entropy"]}
    named = {"KIND": "entropy", "LEVEL": "warning", "MESSAGE": "Entropy fell.", "STEP": "40", "METRICS": "entropy"}
    for name, value in {**named, "RUN": "demo", "RUN_DIR": str(tmp_path / "run"), "TIME": "12.5"}.items():
        assert variables[f"TELESCOPE_ALERT_{name}"] == value
    assert "TELESCOPE_ALERT_ADVICE" not in variables
    assert RunFiles(tmp_path / "run").log("alert_command").read_text() == "sent\n"


def test_the_command_gets_the_attempt_that_a_restart_of_the_trainer_began(tmp_path: Path, out: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        alerts = Alerts(recorder, program("print(json.dumps(alert['attempt']), file=out)"), "demo")
        alerts.add(ROW)
        recorder.attempt += 1
        alerts.add(ROW)
        alerts.close()
    assert lines(out) == [1, 2]


def test_commands_run_one_after_the_other_and_the_last_alert_is_not_lost(
    out: Path, start: Callable[..., Alerts]
) -> None:
    line = "print(json.dumps([{!r}, alert['step']]), file=out)"
    alerts = start(program(f"{line.format('begin')}; {line.format('end')}"))
    for step in range(4):
        alerts.add({**ROW, "step": step})
    alerts.close()
    assert lines(out) == [[word, step] for step in range(4) for word in ("begin", "end")]


def test_a_failing_command_is_one_warning_which_does_not_run_it_again(
    tmp_path: Path, out: Path, start: Callable[..., Alerts], caplog: pytest.LogCaptureFixture
) -> None:
    alerts = start(program("print(1, file=out); print('no route', file=sys.stderr); sys.exit(3)"))
    for _ in range(3):
        alerts.add(ROW)
    alerts.close()
    assert lines(out) == [1, 1, 1]
    (line,) = [record for record in caplog.records if "alert_command" in record.getMessage()]
    assert line.levelno == logging.WARNING and "ended with exit code 3" in line.getMessage()
    assert vars(line)["is_reported"]
    assert "no route" in Path(line.getMessage().rpartition(" is in ")[2]).read_text()
    assert alerts._recorder.flush()
    assert Run(tmp_path / "run").table("alerts")["message"].to_pylist()[3:] == [line.getMessage()]


def test_a_program_that_cannot_be_started_is_one_warning(
    start: Callable[..., Alerts], caplog: pytest.LogCaptureFixture
) -> None:
    alerts = start(["/nonexistent/notify"])
    alerts.add(ROW)
    alerts.add(ROW)
    alerts.close()
    assert [record.getMessage() for record in caplog.records if "/nonexistent/notify" in record.getMessage()][1:] == []
    assert "cannot be started" in caplog.text


def test_a_hanging_command_is_killed_after_its_time_with_its_children(
    out: Path, start: Callable[..., Alerts], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alerts_module, "COMMAND_SECONDS", 3.0)
    alerts = start(["sh", "-c", "sleep 600 & echo $! >> $OUT; wait"])
    alerts.add(ROW)
    alerts.close()
    assert "was killed after 3 s" in caplog.text
    (pid,) = lines(out)
    assert has_ended(pid)


def test_the_end_of_a_run_kills_the_command_that_still_runs_and_tells_what_was_not_sent(
    tmp_path: Path, out: Path, start: Callable[..., Alerts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts_module, "CLOSE_SECONDS", 0.5)
    told: list[str] = []
    alerts = start(program("print(os.getpid(), file=out); time.sleep(600)"), told.append)
    for _ in range(3):
        alerts.add(ROW)
    wait_for(lambda: bool(lines(out)))
    alerts.close()
    (pid,) = lines(out)
    assert has_ended(pid), "the waiting ones have not begun"
    (late,) = told
    assert "was killed 0.5 s after the run had ended, and 2 alerts did not reach it" in late
    assert alerts._recorder.flush()
    assert Run(tmp_path / "run").table("alerts")["message"].to_pylist()[3:] == [late]


def test_a_run_never_waits_for_the_command_and_records_what_the_queue_cannot_take(
    tmp_path: Path, out: Path, start: Callable[..., Alerts], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(alerts_module, "MOST_WAITING", 3)
    monkeypatch.setattr(alerts_module, "CLOSE_SECONDS", 0.2)
    alerts = start(program("time.sleep(600)"))
    for step in range(20):
        alerts.add({**ROW, "step": step})
    assert caplog.text.count("3 alerts wait for alert_command") == 1
    alerts.close()
    assert alerts._recorder.flush()
    assert Run(tmp_path / "run").table("alerts")["step"].drop_null().to_pylist() == list(range(20))


def test_a_command_that_prints_without_end_is_ended_and_its_log_stays_small(
    tmp_path: Path, start: Callable[..., Alerts], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alerts_module, "LOG_BYTES", 2**20)
    alerts = start(["sh", "-c", "yes"])
    for _ in range(3):
        alerts.add(ROW)
    alerts.close()
    log = RunFiles(tmp_path / "run").log("alert_command")
    kept = [path.stat().st_size for path in log.parent.glob("alert_command*")]
    assert max(kept) > 2**20 and sum(kept) < 3 * 2**20
    assert log.read_text().endswith("bytes are kept]\n")
    assert "alert_command" in caplog.text


@pytest.mark.parametrize(("command", "num_warnings"), [(["true"], 0), (["echo", "\0"], 1)])
def test_a_command_that_no_process_takes_is_one_warning_and_any_message_is_taken(
    command: list[str], num_warnings: int, start: Callable[..., Alerts], caplog: pytest.LogCaptureFixture
) -> None:
    alerts = start(command)
    for message in ("half \ud800", "fine", "half \udbff"):
        alerts.run_command({**ROW, "message": message})
    alerts.close()
    assert caplog.text.count("alert_command cannot be started") == num_warnings
    assert alerts._queue.empty()


def test_the_command_runs_for_a_message_that_is_not_valid_unicode(out: Path, start: Callable[..., Alerts]) -> None:
    alerts = start(program("print(os.environ['TELESCOPE_ALERT_MESSAGE'], file=out)"))
    alerts.add({**ROW, "message": "the answer \ud800 failed"})
    alerts.close()
    assert out.read_text() == "the answer ? failed\n"
