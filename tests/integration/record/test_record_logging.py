"""Log lines reach the file, the table and the terminal; a failing disk is reported once."""

import logging
import re
import sys

import pytest

from telescope.record.alerts import Alerts
from telescope.record.files import RunFiles
from telescope.record.logging import _handlers, remove_handlers, setup_logging
from telescope.record.reader import Run
from telescope.record.recorder import REPORTED, Recorder

logger = logging.getLogger("telescope.test")


@pytest.fixture
def installed():
    yield
    remove_handlers()


def test_debug_adds_the_debug_lines_of_telescope_alone(tmp_path, installed):
    setup_logging(tmp_path, "driver", None, debug=True, console=False)
    logger.debug("this too")
    logging.getLogger("other").debug("not this")
    (line,) = RunFiles(tmp_path).log("driver").read_text().splitlines()
    assert line.endswith("this too")


def test_a_line_is_in_the_file_and_in_the_table(tmp_path, installed):
    with Recorder(tmp_path, attempt=2) as recorder:
        setup_logging(tmp_path, "driver", recorder, console=False)
        logger.info("step %d", 7)
        logger.debug("not this")
        logging.getLogger("other").info("nor this")
        try:
            raise ValueError("inner")
        except ValueError:
            logger.exception("failed")
    lines = RunFiles(tmp_path).log("driver").read_text().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO +\d+ telescope\.test:\d+ step 7$", lines[0])
    rows = Run(tmp_path).table("logs").to_pylist()
    found = [(row["level"], row["component"], row["attempt"]) for row in rows]
    assert found == [("INFO", "driver", 2), ("ERROR", "driver", 2)]
    assert "ValueError: inner" in rows[1]["message"]
    assert rows[0]["place"].startswith("telescope.test:")


def test_a_line_that_cannot_be_formatted_does_not_raise(tmp_path, installed, monkeypatch, capsys):
    class Odd:
        def __str__(self):
            raise RuntimeError("no text")

    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # without pytest's, which raises
    with Recorder(tmp_path) as recorder:
        setup_logging(tmp_path, "driver", recorder, console=False)
        logger.warning("%(missing)s", {"other": 1})
        logger.warning("%s", Odd())
        logger.warning("the next")
    assert [row["message"] for row in Run(tmp_path).table("logs").to_pylist()] == ["the next"]
    assert "no text" in capsys.readouterr().err


def test_only_warnings_go_to_the_terminal(tmp_path, installed, capsys):
    setup_logging(tmp_path, "driver", None)
    logger.info("quiet")
    logger.warning("loud")
    assert capsys.readouterr().err == "WARNING telescope.test: loud\n"


def test_control_sequences_reach_neither_the_file_nor_the_terminal(tmp_path, installed, capsys):
    setup_logging(tmp_path, "driver", None)
    logger.warning("%s", "\x1b[31mred\x1b[0m \x1b]0;title\x07\x9b1mline\n\tnext")
    written = RunFiles(tmp_path).log("driver").read_text() + capsys.readouterr().err
    assert written.count("red line\n next\n") == 2
    assert not set("\x1b\x07\x9b") & set(written)


def test_setting_up_again_replaces_the_handlers(tmp_path, installed):
    before = list(logging.getLogger().handlers)
    setup_logging(tmp_path / "a", "driver", None, console=False)
    setup_logging(tmp_path / "b", "driver", None, console=False)
    assert len(logging.getLogger().handlers) == len(before) + 1
    logger.warning("once")
    assert not RunFiles(tmp_path / "a").log("driver").exists()
    assert RunFiles(tmp_path / "b").log("driver").read_text().count("once") == 1


def test_an_unwritable_log_is_reported_once(tmp_path, installed, capsys):
    (tmp_path / "logs").write_text("in the way")
    setup_logging(tmp_path, "driver", None, console=False)
    for _ in range(5):
        logger.warning("lost")
    assert capsys.readouterr().err.count("log lines are lost") == 1


def test_invalid_unicode_and_wrong_formats_do_not_raise(tmp_path, installed, monkeypatch, capsys):
    with Recorder(tmp_path) as recorder:
        setup_logging(tmp_path, "driver", recorder, console=False)
        # Not through the root logger: a worker of pytest-xdist cannot report what pytest would capture there.
        record = logger.makeRecord("telescope.test", logging.WARNING, __file__, 1, "a\ud800b", (), None)
        for handler in _handlers:
            handler.handle(record)
        monkeypatch.setattr(sys, "stderr", sys.__stderr__)
        monkeypatch.setattr(logging, "raiseExceptions", False)
        logger.warning("%d", "x")
    assert Run(tmp_path).table("logs")["message"].to_pylist()[0] == "a?b"


def test_the_first_warning_of_each_place_is_an_alert_unless_it_is_one_already(tmp_path, installed):
    told: list[str] = []
    with Recorder(tmp_path) as recorder:
        setup_logging(tmp_path, "driver", recorder, alerts=Alerts(recorder, tell=told.append), console=False)
        for number in range(3):
            logger.warning("sample %d is masked", number)
        logger.error("the disk is full")
        logger.warning("server 1 is down", extra=REPORTED)
        logging.getLogger("other").warning("a library")
        logger.info("step 1")
    rows = Run(tmp_path).table("alerts").to_pylist()
    found = [(row["level"], row["kind"], row["message"]) for row in rows]
    assert found == [("warning", "log", "sample 0 is masked"), ("error", "log", "the disk is full")]
    assert told == ["sample 0 is masked", "the disk is full"], "a run without a terminal prints them"
