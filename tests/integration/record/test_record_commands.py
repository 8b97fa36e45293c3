"""`telescope runs` and `telescope query`, from the command line to the printed answer."""

import csv
import io
import json

import pytest

from telescope.cli.main import main
from telescope.record import Recorder
from telescope.record.attempt import begin_run, end_run


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


def test_runs_as_json(ask, root):
    runs = json.loads(ask("runs", "--json")[1])
    assert [run["label"] for run in runs] == ["third", "second", "first"]
    assert runs[0] | {"status": "finished", "steps": 3, "reward_last": 0.5, "path": str(root / "third")} == runs[0]


def test_a_folder_without_runs_says_what_to_do(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "telescope train" in capsys.readouterr().out
    assert main(["query", "SELECT 1", "--root", str(tmp_path)]) == 2
    assert "--root" in capsys.readouterr().err


def test_csv_is_exact_and_has_a_header(ask):
    out = ask(
        "query", "SELECT step, reward_mean, metrics FROM steps ORDER BY step", "--run", "third", "--format", "csv"
    )[1]
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["reward_mean"] for row in rows] == ["0.0", "0.25", "0.5"]
    assert json.loads(rows[0]["metrics"]) == {"entropy": 0.25, "odd": None}


def test_json_is_valid_json(ask):
    sql = "SELECT run, metrics, 'nan'::DOUBLE AS x, DATE '2026-01-01' AS day FROM steps WHERE step = 0"
    assert json.loads(ask("query", sql, "--run", "third", "--format", "json")[1]) == [
        {"run": "third", "metrics": {"entropy": 0.25, "odd": None}, "x": None, "day": "2026-01-01"}
    ]


def test_a_table_shows_markup_as_it_is_and_says_when_it_is_empty(ask):
    assert "[bold]x[/bold]" in ask("query", "SELECT '[bold]x[/bold]' AS text")[1]
    assert "(no rows)" in ask("query", "SELECT * FROM spans")[1]


def test_latest_is_the_run_that_started_last(ask):
    assert ask("query", "SELECT DISTINCT run FROM steps", "--run", "latest", "--format", "csv")[1] == "run\nthird\n"


def test_a_run_can_be_named_by_folder_path_or_name(ask, root):
    for name in ("third", "countdown", str(root / "third")):
        assert ask("query", "SELECT count(*) AS n FROM steps", "--run", name, "--format", "csv")[1] == "n\n3\n"


def test_several_runs_are_compared(ask):
    sql = "SELECT run, count(*) AS n FROM steps GROUP BY run ORDER BY run"
    assert ask("query", sql, "--run", "first", "--run", "second", "--format", "csv")[1] == "run,n\nfirst,3\nsecond,3\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("SELECT 1", "--run", "demo"), ["2 runs have that name", "first, second"]),
        (("SELECT 1", "--run", "thrid"), ["no such run", "Did you mean 'third'?"]),
        (("SELECT reward FROM steps",), ["no column 'reward'", "reward_mean"]),
        (("SELECT * FROM step",), ["no table 'step'", "Did you mean 'steps'?"]),
        (("DROP VIEW steps",), ["read-only"]),
        ((), ["no query", "--tables"]),
    ],
)
def test_what_is_wrong_is_said_with_exit_code_2(ask, arguments, parts):
    status, out, error = ask("query", *arguments)
    assert (status, out) == (2, "")
    assert all(part in error for part in parts), error


def test_the_tables_are_described(capsys):
    assert main(["query", "--tables"]) == 0
    out = capsys.readouterr().out
    assert "steps: One row per training step." in out
    assert "map(varchar, double)" in out
