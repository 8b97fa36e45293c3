"""`telescope runs`, `query` and `compact`, from the command line to the output."""

import csv
import io
import json
import random
import shutil
import tempfile
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from telescope.cli.main import main
from telescope.cli.query import MAX_TERMINAL_ROWS, print_result
from telescope.dashboard.registry import Registry
from telescope.errors import EXIT_INTERRUPTED
from telescope.record import table_writer
from telescope.record.files import WriterLock
from telescope.record.query import Result
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run, end_run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("a root with a long name so that a table of runs is wider than a terminal") / "runs"
    for folder, name in (("first", "demo"), ("second", "demo"), ("third", "countdown")):
        with Recorder(root / folder, flush_seconds=0.01) as recorder:
            info = begin_run(recorder, name=name, config_hash="", config_json="{}")
            for step in range(3):
                metrics = {"entropy": 0.25, "odd": float("nan")}
                recorder.write("steps", {"step": step, "reward_mean": step / 4, "metrics": metrics})
            end_run(recorder, info, "finished", config_json="{}")
    return root


@pytest.fixture
def ask(capsys, root):
    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([*arguments, "--root", str(root)])
        return status, *capsys.readouterr()

    return call


def test_runs_are_a_table_with_whole_paths(ask, root):
    status, out, _ = ask("runs")
    assert status == 0
    assert "0 -> 0.5" in out
    assert all(str(root / folder) in out for folder in ("first", "second", "third"))


def test_a_run_shows_its_progress_and_its_first_accuracy_before_it_ends(capsys, tmp_path):
    with Recorder(tmp_path / "run", flush_seconds=0.01) as recorder:
        info = begin_run(recorder, name="run", config_hash="", config_json="{}", num_steps=60)
        recorder.write("steps", {"step": 0})
        recorder.replace_json(recorder.files.run_json, asdict(replace(info, heldout_before=0.25)))
        recorder.flush()
        assert main(["runs", "--root", str(tmp_path)]) == 0
        out = capsys.readouterr().out
    assert "training" in out and " 1/60 " in out and "0.25 -> -" in out


DUMP = "RayTaskError(EngineStartError): \x1b[36mray::InferenceActor.start()\x1b[39m (pid=28718)\n" + "a frame\n" * 200
DUMPED = "RayTaskError(EngineStartError): ray::InferenceActor.start() (pid=28718)"


def test_the_error_of_a_run_is_recorded_as_one_plain_line(tmp_path):
    with Recorder(tmp_path / "run", flush_seconds=0.01) as recorder:
        info = begin_run(recorder, name="run", config_hash="", config_json="{}")
        assert end_run(recorder, info, "failed", config_json="{}", error=DUMP).error == DUMPED
    assert json.loads((tmp_path / "run" / "run.json").read_text())["error"] == DUMPED
    assert Run(tmp_path / "run").table("runs").to_pylist()[0]["error"] == DUMPED


def test_a_traceback_in_an_old_record_is_one_line_in_the_list_of_runs(capsys, tmp_path):
    with Recorder(tmp_path / "run", flush_seconds=0.01) as recorder:
        info = begin_run(recorder, name="run", config_hash="", config_json="{}")
        end_run(recorder, info, "failed", config_json="{}")
    path = tmp_path / "run" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"error": DUMP}))
    assert main(["runs", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "a frame" not in out
    assert "\x1b" not in out
    assert out.splitlines()[-1] == f"run: {DUMPED}"
    assert main(["runs", "--json", "--root", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["error"] == DUMPED


def test_a_folder_whose_name_is_not_utf_8_is_left_out_with_a_warning(capsys, caplog, tmp_path):
    for name in ("good", "bad\udcff"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    for command in (["runs", "--json"], ["query", "SELECT 1"]):
        assert main([*command, "--root", str(tmp_path)]) == 0
        assert "Rename the folder" in caplog.messages[-1]
    assert "bad" not in capsys.readouterr().out
    assert main(["query", "SELECT 1", "--run", str(tmp_path / "bad\udcff")]) == 2


def test_runs_as_json(ask, root):
    runs = json.loads(ask("runs", "--json")[1])
    assert [run["label"] for run in runs] == ["third", "second", "first"]
    assert runs[0] | {"status": "finished", "steps": 3, "reward_last": 0.5, "path": str(root / "third")} == runs[0]


def test_an_error_for_a_folder_without_runs_names_the_fix(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "telescope train" in capsys.readouterr().out
    assert main(["query", "SELECT 1", "--root", str(tmp_path)]) == 2
    assert "--root" in capsys.readouterr().err


def test_csv_is_exact_and_has_a_header(ask):
    sql = "SELECT step, reward_mean, metrics FROM steps ORDER BY step"
    out = ask("query", sql, "--run", "third", "--format", "csv")[1]
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["reward_mean"] for row in rows] == ["0.0", "0.25", "0.5"]
    assert json.loads(rows[0]["metrics"]) == {"entropy": 0.25, "odd": None}


def test_json_is_valid_json(ask):
    sql = "SELECT run, metrics, 'nan'::DOUBLE AS x, DATE '2026-01-01' AS day FROM steps WHERE step = 0"
    assert json.loads(ask("query", sql, "--run", "third", "--format", "json")[1]) == [
        {"run": "third", "metrics": {"entropy": 0.25, "odd": None}, "x": None, "day": "2026-01-01"}
    ]


def test_a_table_shows_markup_unchanged_and_reports_no_rows(ask):
    assert "[bold]x[/bold]" in ask("query", "SELECT '[bold]x[/bold]' AS text")[1]
    assert "(no rows)" in ask("query", "SELECT * FROM spans")[1]


def test_latest_names_the_run_that_it_is(ask, root):
    assert f"the latest run is {root / 'third'}\n" in ask("query", "SELECT 1", "--run", "latest")[2]
    assert ask("query", "SELECT DISTINCT run FROM steps", "--run", "latest", "--format", "csv")[1] == "run\nthird\n"
    assert f"3 runs in {root}\n" in ask("query", "SELECT 1")[2]
    assert ask("query", "SELECT 1", "--run", str(root / "third"))[2] == "", "a path that was typed is known"


def test_a_name_is_in_the_message_where_no_runs_are(tmp_path, capsys):
    assert main(["query", "SELECT 1", "--run", "data/a.jsonl", "--root", str(tmp_path)]) == 2
    assert "The folder 'data/a.jsonl' does not exist. No runs in" in capsys.readouterr().err
    assert main(["tui", "--root", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("telescope: No runs in")


@pytest.mark.parametrize("command", [("query", "SELECT DISTINCT run FROM steps"), ("runs",)])
def test_runs_are_found_where_the_environment_variable_puts_them(command, root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TELESCOPE_RUN_DIR", str(tmp_path / "none"))
    assert main([*command]) == (2 if command[0] == "query" else 0)
    assert "No runs in" in (text := "".join(capsys.readouterr())) and f"runs, {tmp_path / 'none'}" in text
    monkeypatch.setenv("TELESCOPE_RUN_DIR", str(root / "second"))
    assert main([*command]) == 0
    assert "second" in capsys.readouterr().out
    (tmp_path / "runs").symlink_to(root)
    assert main([*command]) == 0
    lines = capsys.readouterr().out.splitlines()
    folders = [line.split()[-1].rpartition("/")[2] for line in lines[1:]]
    assert sorted(folders) == ["first", "second", "third"], "each once"


def test_a_run_can_be_named_by_folder_path_or_name(ask, root):
    for name in ("third", "countdown", str(root / "third")):
        assert ask("query", "SELECT count(*) AS n FROM steps", "--run", name, "--format", "csv")[1] == "n\n3\n"


def test_several_runs_are_compared(ask):
    sql = "SELECT run, count(*) AS n FROM steps GROUP BY run ORDER BY run"
    assert ask("query", sql, "--run", "first", "--run", "second", "--format", "csv")[1] == "run,n\nfirst,3\nsecond,3\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("SELECT 1", "--run", "demo"), ["2 runs have the name 'demo'", "first, second"]),
        (("SELECT 1", "--run", "thrid"), ["no run 'thrid'", "Did you mean 'third'?"]),
        (("SELECT 1", "--run", "latst"), ["no run 'latst'", "Did you mean 'latest'?"]),
        (("SELECT 1", "--run", "./thrid"), ["The folder './thrid' does not exist.", "Did you mean 'third'?"]),
        (("SELECT 1", "--run", "/"), ["'/' is not a run: it has neither run.json nor tables/"]),
        (("SELECT reward FROM steps",), ["no column 'reward'", "reward_mean"]),
        (("SELECT * FROM step",), ["no table 'step'", "Did you mean 'steps'?"]),
        (("DROP VIEW steps",), ["read-only"]),
        ((), ["No query", "--tables"]),
        (("SELECT '\udcff'",), ["not valid UTF-8 at character 9"]),
        (("CREATE TABLE x AS PIVOT steps ON step USING sum(reward_mean)",), ["CREATE is not possible", "read-only"]),
        (("-- x\nEXPLAIN ANALYZE COPY (PIVOT steps ON step USING sum(step)) TO 'x'",), ["COPY is not possible"]),
        (("EXPLAIN (ANALYZE) DROP VIEW steps",), ["DROP is not possible"]),
        (("SET enable_external_access = true",), []),
        (("SELECT set_config('enable_external_access', 'true')",), []),
        (("SELECT * FROM sql",), []),  # a variable of this process
    ],
)
def test_bad_input_is_an_error_with_exit_code_2(ask, arguments, parts):
    status, out, error = ask("query", *arguments)
    assert (status, out) == (2, "")
    assert all(part in error for part in parts), error


@pytest.mark.parametrize(
    "source",
    [
        "read_text('{file}')", "read_csv('{file}')", "glob('{folder}/*')", "'{file}'", "'.tmp/secret.csv'",
        "read_parquet('https://example.com/x')", "read_text('{folder}/.tmp/*')",
    ],
)  # fmt: skip
def test_a_query_reads_only_the_tables(ask, monkeypatch, tmp_path, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".tmp").mkdir()
    (tmp_path / ".tmp" / "secret.csv").write_text("a,b\n1,2\n")
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    status, out, error = ask("query", "SELECT * FROM " + source.format(file=secret, folder=tmp_path))
    assert (status, out) == (2, "")
    assert "Traceback" not in error


def test_a_large_query_leaves_nothing_behind(ask, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert ask("query", "SELECT count(DISTINCT md5(a::VARCHAR)) AS n FROM range(10000) t(a)")[0] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "sql",
    [
        "-- a comment\nEXPLAIN SELECT step FROM steps",
        "/* one /* in */ another */ explain analyze -- why\nFROM steps",
        "EXPLAIN (FORMAT json) SELECT 1",
        "EXPLAIN (SELECT 1)",
        "EXPLAIN PIVOT steps ON step USING sum(reward_mean)",
    ],
)
def test_a_reading_statement_is_explained(ask, sql):
    assert ask("query", sql)[0] == 0


def test_a_pivot_makes_columns_of_values(ask):
    sql = "PIVOT (SELECT step, reward_mean FROM steps) ON step USING sum(reward_mean)"
    for statement in (sql, f"FROM ({sql})", f"-- ü\n({sql})", f"WITH wide AS ({sql}) SELECT * FROM wide"):
        status, out, _ = ask("query", statement, "--run", "third", "--format", "json")
        assert (status, json.loads(out)) == (0, [{"0": 0.0, "1": 0.25, "2": 0.5}])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_control_sequences_in_values_and_names_do_not_reach_a_terminal(form, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")  # the table itself has no styles then
    out = Terminal()
    print_result(Result(("a\x1b[2Jb",), [("c\x1b[31md\x9b1me\x1b]0;title\x07f",)]), form, out)
    assert not set("\x1b\x9b\x07") & set(out.getvalue())
    if form != "json":  # which writes them as escapes, and so exactly
        assert out.getvalue().split() == ["ab", "cdef"]


def test_a_long_result_is_whole_in_a_pipe_and_its_beginning_on_a_terminal(capsys):
    long = Result(("n", "text"), [(n, "two\nlines" if n == 7 else "ü") for n in range(MAX_TERMINAL_ROWS + 5)])
    pipe, terminal = io.StringIO(), Terminal()
    print_result(long, "table", pipe)
    print_result(long, "table", terminal)
    lines = pipe.getvalue().splitlines()
    assert lines[:2] == ["  n  text", "  0  ü"]
    assert lines[8:10] == ["  7  two", "     lines"]
    assert len(lines) == 1 + MAX_TERMINAL_ROWS + 5 + 1
    assert len(terminal.getvalue().splitlines()) == 1 + MAX_TERMINAL_ROWS + 1
    assert "500 of 505 rows" in capsys.readouterr().err


def test_control_sequences_in_names_and_errors_do_not_reach_a_terminal(capsys, tmp_path):
    with Recorder(tmp_path / "run\x1b[2J", flush_seconds=0.01) as recorder:
        info = begin_run(recorder, name="na\x1b[31mme", config_hash="", config_json="{}")
        recorder.write("steps", {"step": 1, "metrics": {}})
        recorder.write("prompts", {"prompt_key": "1", "text": "\x1b[31mred"})
        end_run(recorder, info, "failed", config_json="{}", error="it broke")
    assert main(["runs", "--root", str(tmp_path)]) == 0
    assert main(["query", "SELECT text::INTEGER FROM prompts", "--root", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert "name" in out and "it broke" in out and "red" in error
    assert "\x1b" not in out + error


def test_csv_in_a_file_holds_values_as_they_are(ask):
    assert ask("query", "SELECT chr(27) || '[31m' AS x", "--format", "csv")[1] == "x\n\x1b[31m\n"


def test_tables_are_read_from_a_relative_folder_with_odd_characters(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    with Recorder(tmp_path / "it's [1] * ?" / "run", flush_seconds=0.01) as recorder:
        begin_run(recorder, name="odd", config_hash="", config_json="{}")
        recorder.write("steps", {"step": 7})
    assert main(["query", "SELECT step FROM steps", "--root", "it's [1] * ?", "--format", "csv"]) == 0
    assert capsys.readouterr().out == "step\n7\n"


def test_times_with_a_time_zone_are_text(ask):
    sql = "SELECT to_timestamp(0) AS t, [to_timestamp(0)] AS l, 1 AS n, 2 AS n"
    status, out, _ = ask("query", sql, "--format", "json")
    row = json.loads(out)[0]
    assert status == 0
    assert row["t"].startswith(("1970-01-01", "1969-12-31"))
    assert row["n"] == 2


def test_an_sql_error_is_one_error_with_its_position(ask):
    status, _, error = ask("query", "SELECT step, FROM FROM steps")
    assert status == 2 and error.startswith("telescope: Parser Error") and "problems" not in error
    assert "LINE 1: SELECT step, FROM FROM steps" in error and "^" in error


@pytest.fixture
def damaged(tmp_path):
    """A folder of two runs, and the file with the steps of the second, to be damaged."""
    for folder, first in (("whole", 0), ("hurt", 100)):
        with Recorder(tmp_path / "runs" / folder, flush_seconds=0.01) as recorder:
            begin_run(recorder, name=folder, config_hash="", config_json="{}")
            for step in range(first, first + 40):
                numbers = {"reward_mean": random.random(), "metrics": {"x": random.random()}}
                recorder.write("steps", {"step": step, **numbers})
    (path,) = (tmp_path / "runs" / "hurt" / "tables" / "steps").glob("*.parquet")
    return tmp_path / "runs", path


def wipe_footer(content: bytes) -> bytes:
    return content[:-60] + b"\xff" * 52 + content[-8:]


def wipe_pages(content: bytes) -> bytes:
    return content[:4] + b"\xff" * (len(content) // 2) + content[4 + len(content) // 2 :]


@pytest.mark.parametrize("damage", [lambda content: content[:-1], wipe_footer, wipe_pages, lambda content: b""])
def test_a_damaged_file_is_left_out_with_a_warning_and_an_exit_code(damaged, damage, capsys, caplog):
    root, path = damaged
    path.write_bytes(damage(path.read_bytes()))
    status = main(["query", "SELECT * FROM steps", "--root", str(root), "--format", "json"])
    out, error = capsys.readouterr()
    assert status == 1
    assert [row["step"] for row in json.loads(out)] == list(range(40))
    assert "the answer is incomplete: 1 file of a table cannot be read" in error
    assert sum(f"{path} is damaged" in record.message for record in caplog.records) == 1


def test_runs_are_listed_around_a_damaged_file(damaged, capsys):
    root, path = damaged
    path.write_bytes(wipe_footer(path.read_bytes()))
    assert main(["runs", "--root", str(root)]) == 0
    out, error = capsys.readouterr()
    assert "hurt" in out
    assert "the list is incomplete: 1 file of a table cannot be read" in error


def test_a_summary_that_nests_without_end_does_not_hide_the_other_runs(damaged, capsys):
    root, _ = damaged
    (root / "hurt" / "summary.json").write_text("[" * 100_000)
    assert main(["runs", str(root)]) == 0
    assert "hurt" in capsys.readouterr().out


def test_a_broken_config_of_a_run_is_named_with_its_line(damaged, capsys):
    root, _ = damaged
    config = root / "hurt" / "config.yaml"
    for content, words in (
        ("seed: 1\nmodel: [a\n", f"{config} is not valid YAML: did not find expected ',' or ']'"),
        ("- seed\n", f"{config} must hold `field: value` lines"),
        (b"seed: \xff\n", f"{config} is not valid YAML"),
    ):
        config.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert main(["runs", "--root", str(root)]) == 0
        out, error = capsys.readouterr()
        assert "hurt" in out and words in error
        assert dict(Registry([root]).listings())["hurt"].config_problem in error
    config.write_text("seed: 1\nmodel: [a\n")
    registry = Registry([root])
    registry.listings()
    (problem,) = registry.problems
    assert problem["path"] == str(root / "hurt") and "(line 3, column 1)" in problem["problem"]


def test_the_tables_are_described(capsys):
    assert main(["query", "--tables"]) == 0
    out = capsys.readouterr().out
    assert "steps: One row per training step." in out
    assert "map(varchar, double)" in out


def test_a_killed_run_is_compacted_into_one_file_per_table(tmp_path, capsys):
    recorder = Recorder(tmp_path / "run", block_rollouts=1, tail_seconds=0.0)
    for step in range(5):
        recorder.write("samples", {"sample_id": str(step), "step": step})
        recorder.write("steps", {"step": step, "metrics": {"entropy": 0.5}})
        assert recorder.flush(30)
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    recorder.close()
    before = [Run(tmp_path / "killed").table(name) for name in ("samples", "steps")]
    assert main(["compact", "killed", "--root", str(tmp_path)]) == 0
    assert "10 files" in capsys.readouterr().out
    assert [Run(tmp_path / "killed").table(name) for name in ("samples", "steps")] == before
    assert [path.suffix for path in sorted((tmp_path / "killed" / "tables").glob("*/*"))] == [".parquet"] * 2
    assert main(["compact", str(tmp_path / "killed")]) == 0, "once more changes nothing"
    assert "2 files" in capsys.readouterr().out


def test_a_live_run_is_not_compacted(tmp_path, capsys):
    with Recorder(tmp_path / "run") as recorder:
        begin_run(recorder, name="run", config_hash="", config_json="{}")
        assert recorder.flush(30)
        assert main(["compact", str(tmp_path / "run")]) == 2
        assert "is live. Compact it when it has ended" in capsys.readouterr().err
    (tmp_path / "run" / "run.json").unlink()
    with Recorder(tmp_path / "run") as recorder:
        assert recorder.flush(30)
        assert main(["compact", str(tmp_path / "run")]) == 2
        assert "is in use" in capsys.readouterr().err


def test_a_second_compaction_is_not_blamed_on_the_process_that_trained(tmp_path, capsys):
    with Recorder(tmp_path / "run") as recorder:
        assert recorder.flush(30)
    heartbeat = json.loads(recorder.files.heartbeat.read_text())
    heartbeat["process"]["started"] = "0"  # that process has exited, and its id may belong to another one
    recorder.files.heartbeat.write_text(json.dumps(heartbeat))
    first = WriterLock(recorder.files)
    first.acquire()
    assert main(["compact", str(tmp_path / "run")]) == 2
    first.release()
    error = capsys.readouterr().err
    assert "Another process, such as `telescope compact`, writes it" in error
    assert str(heartbeat["process"]["pid"]) not in error.replace(str(tmp_path), "")


def test_a_compaction_without_space_says_so_and_loses_nothing(tmp_path, capsys, monkeypatch):
    with Recorder(tmp_path / "run", block_seconds=0.0) as recorder:
        for step in range(2):
            recorder.write("steps", {"step": step})
            assert recorder.flush(30)

    monkeypatch.setattr(table_writer, "sync", Mock(side_effect=OSError(28, "No space left on device")))
    assert main(["compact", str(tmp_path / "run")]) == 1
    assert "No space left on device. Nothing is lost." in capsys.readouterr().err
    assert Run(tmp_path / "run").table("steps")["step"].to_pylist() == [0, 1]
    assert not list(tmp_path.rglob(".writing-*"))


def test_watched_runs_are_read_again(capsys, monkeypatch, tmp_path):
    def begin_then_interrupt(_seconds: float) -> None:
        if (tmp_path / "second").exists():
            raise KeyboardInterrupt
        with Recorder(tmp_path / "second") as recorder:
            begin_run(recorder, name="second", config_hash="", config_json="{}")

    monkeypatch.setattr("telescope.cli.runs.time", SimpleNamespace(sleep=begin_then_interrupt))
    assert main(["runs", "--watch", "--root", str(tmp_path)]) == EXIT_INTERRUPTED
    assert "second" in capsys.readouterr().out
