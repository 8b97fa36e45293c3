"""Lines of log files become entries, with level, process, place and whole tracebacks."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from telescope.record.log_files import MAX_BEHIND_BYTES, MAX_BYTES_PER_POLL, MAX_LINE, LogFiles, LogParser
from telescope.record.tables import COLUMN_NAMES

NOW = time.mktime((2026, 11, 22, 20, 22, 20, 0, 0, -1))

VLLM = """\
(APIServer pid=17) INFO 11-22 20:22:13 [api_utils.py:347]
(APIServer pid=17) INFO 11-22 20:22:13 [api_utils.py:347]  ▄▄ ▄█
(APIServer pid=17) INFO 11-22 20:22:13 [model.py:733] Resolved architecture: Qwen2ForCausalLM
(Worker pid=18) WARNING 11-22 20:22:14 [vllm.py:725] Model Runner V2 requires Triton
Loading shards:   0% Completed\rLoading shards: 100% Completed
W1122 20:22:41.062000 17696 torch/_library/triton.py:53] Triton not available
/venv/vllm/dispatcher.py:138: FutureWarning: `torch.distributed.reduce_op` is deprecated
  if hasattr(value, "__dict__"):
(APIServer pid=17) ERROR 11-22 20:22:15 [async_llm.py:906] AsyncLLM output_handler failed.
(APIServer pid=17) ERROR 11-22 20:22:15 [async_llm.py:906] Traceback (most recent call last):
(APIServer pid=17) ERROR 11-22 20:22:15 [async_llm.py:906]   File "async_llm.py", line 849, in output_handler
(APIServer pid=17) ERROR 11-22 20:22:15 [async_llm.py:906] vllm.EngineDeadError: EngineCore encountered an issue.
INFO:     Shutting down
"""

TRAINER = """\
2026-11-22T20:21:22.677Z ERROR   16513 telescope.trainer.worker:104 step 3 failed
Traceback (most recent call last):
  File "a.py", line 1, in step
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in run
    raise ValueError("no")
ValueError: no
telescope: received SIGTERM, exiting
Traceback (most recent call last):
  File "c.py", line 3, in <module>
MemoryError
"""


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return []


def files_of(logs: Path, rows: list[dict[str, Any]]) -> LogFiles:
    """Reads what is appended to the files from now on into `rows`."""
    return LogFiles(logs.parent, lambda table, row: rows.append(row))


def parsed(text: str) -> list[dict[str, Any]]:
    parser = LogParser()
    rows = [row for line in text.split("\n") for row in parser.feed(line, NOW)]
    return [*rows, *parser.end()]


def test_lines_of_vllm_have_level_process_place_and_time() -> None:
    banner, model, worker, progress, torch, warning, failed, uvicorn = parsed(VLLM)
    assert (banner["message"], banner["process"]) == (" ▄▄ ▄█", 17)
    assert (model["level"], model["place"], model["time"]) == ("INFO", "model.py:733", NOW - 7)
    assert (worker["level"], worker["process"], worker["message"]) == ("WARNING", 18, "Model Runner V2 requires Triton")
    assert progress["message"] == "Loading shards: 100% Completed", "only the last state of a progress bar"
    assert (torch["level"], torch["place"]) == ("WARNING", "torch/_library/triton.py:53")
    assert (warning["level"], warning["message"].count("\n")) == ("WARNING", 1)
    assert failed["level"] == "ERROR"
    assert failed["message"].splitlines()[0] == "AsyncLLM output_handler failed."
    assert failed["message"].splitlines()[-1] == "vllm.EngineDeadError: EngineCore encountered an issue."
    assert (uvicorn["level"], uvicorn["message"]) == ("INFO", "Shutting down")


def test_tracebacks_are_kept_whole_with_the_exceptions_before_them() -> None:
    failed, stopped, crashed = parsed(TRAINER)
    assert (failed["level"], failed["process"], failed["place"]) == ("ERROR", 16513, "telescope.trainer.worker:104")
    assert failed["message"].startswith("step 3 failed\nTraceback")
    assert "KeyError: 'x'\n\nDuring handling" in failed["message"] and failed["message"].endswith("ValueError: no")
    assert stopped["level"] == "INFO"
    assert (crashed["level"], crashed["message"].splitlines()[-1]) == ("ERROR", "MemoryError")


def test_a_long_entry_is_not_read_again_for_each_of_its_lines() -> None:
    class WrittenOnly(list[str]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("with the whole entry, 1 MiB of lines would occupy the driver for a minute")

    parser = LogParser()
    assert not [*parser.feed("2026-11-22T20:21:22.677Z INFO    1 a.b:1 the configuration:", NOW)]
    assert parser._entry is not None
    parser._entry.lines = WrittenOnly(parser._entry.lines)
    assert not [row for line in ("  key: value", "", "  other: value") for row in parser.feed(line, NOW)]


@pytest.mark.parametrize(
    "line", ["\x1b[31mred\x1b[0m", "\x00\x07\x1b]8;;http://a\x07b", "\r\r", "   ", "(APIServer pid=1) "]
)
def test_control_sequences_and_empty_lines_leave_no_trace(line: str) -> None:
    assert all("\x1b" not in row["message"] and row["message"].strip() for row in parsed(line))


def test_what_is_appended_is_recorded_once_with_its_file(logs, rows) -> None:
    (logs / "inference-0.log").write_text("of an earlier attempt\n")
    (logs / "driver.log").write_text("")
    files = files_of(logs, rows)

    def append(name: str, text: str) -> None:
        with (logs / name).open("a") as stream:
            stream.write(text)

    append("inference-0.log", "one\ntw")
    append("trainer-1.log", "from the first line on\n")
    append("driver.log", "is in the table already\n")
    files.poll(1.0)
    append("inference-0.log", "o\n")
    files.poll(2.0)
    files.poll(3.0)
    assert sorted((row["source"], row["component"], row["message"]) for row in rows) == [
        ("inference-0.log", "inference-0", "one"),
        ("inference-0.log", "inference-0", "two"),
        ("trainer-1.log", "trainer-1", "from the first line on"),
    ]
    assert all(set(row) <= COLUMN_NAMES["logs"] for row in rows)
    (logs / "inference-0.log").write_text("new\n")
    append("trainer-1.log", "no line end")
    files.poll(4.0, last=True)
    assert {row["message"] for row in rows[3:]} == {"new", "no line end"}, "an emptied file is read from its start"


def test_a_file_that_grows_too_fast_is_read_in_part(logs, rows) -> None:
    files = files_of(logs, rows)
    (logs / "environment-0.log").write_bytes(b"x" * (MAX_BEHIND_BYTES + 10) + b"\nlast\n")
    for now in range(3):
        files.poll(float(now), last=now == 2)
    assert rows[0]["level"] == "WARNING"
    assert f"{MAX_BEHIND_BYTES + 16 - MAX_BYTES_PER_POLL} bytes" in rows[0]["message"]
    assert rows[-1]["message"] == "last"
    assert all(len(row["message"]) <= MAX_LINE for row in rows)


def test_lines_without_a_place_are_one_entry_each() -> None:
    rows = parsed("ready\nINFO:     Started\nERROR:    Exception in ASGI application\nINFO:     Shutting down")
    assert [(row["level"], row["message"]) for row in rows] == [
        ("INFO", "ready"), ("INFO", "Started"), ("ERROR", "Exception in ASGI application"), ("INFO", "Shutting down"),
    ]  # fmt: skip


def test_the_last_poll_reads_to_the_end_of_a_file(logs, rows) -> None:
    files = files_of(logs, rows)
    line = "x" * (MAX_LINE - 1)
    (logs / "trainer-0.log").write_text(f"{line}\n" * 100 + "MemoryError: the last line\n")
    files.poll(NOW, last=True)
    assert len(rows) == 101 and rows[-1]["message"] == "MemoryError: the last line"


@pytest.mark.parametrize("header", ["INFO 29-11 20:22:13 [a.py:1]", "2026-02-30T20:22:13.000Z INFO    17 a:1"])
def test_a_line_with_an_impossible_date_has_the_time_at_which_it_was_read(header: str) -> None:
    (row,) = parsed(f"{header} hello")
    assert (row["message"], row["time"]) == ("hello", NOW)


def test_a_number_that_is_too_long_for_a_process_id_is_text() -> None:
    (row,) = parsed(f"(Worker pid={'1' * 5000}) hello")
    assert (row["process"], row["message"][-5:]) == (None, "hello")


def test_a_log_that_cannot_be_read_hides_no_other(logs, rows, monkeypatch, caplog) -> None:
    (logs / "a.log").symlink_to("gone")
    (logs / "b.log").mkdir()
    files = files_of(logs, rows)
    (logs / "c.log").write_text("first\n")
    (logs / "d.log").write_text("second\n")
    opened = Path.open

    def refuse(path: Path, *arguments: Any) -> Any:
        if path.name == "c.log":
            raise PermissionError("no")
        return opened(path, *arguments)

    monkeypatch.setattr(Path, "open", refuse)
    for _ in range(2):
        files.poll(NOW, last=True)
    assert [row["message"] for row in rows] == ["second"]
    assert len(caplog.messages) == 1
    assert "c.log" in caplog.text
