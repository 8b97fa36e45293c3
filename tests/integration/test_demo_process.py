"""`telescope ui --demo`: the process that writes its runs, and what is left of it."""

import subprocess
import sys
from pathlib import Path

from tests.processes import wait_for

from telescope.cli.main import main
from telescope.record.reader import Run
from telescope.testing.demo import demo_runs

NUM_STEPS = 12


def test_the_demo_is_live_grows_and_leaves_nothing() -> None:
    with demo_runs(NUM_STEPS) as folder:
        run = Run(folder / "demo")
        assert run.status == "live"
        assert run.table("steps").num_rows >= NUM_STEPS
        assert run.table("samples").num_rows > 0
        wait_for(lambda: run.table("steps").num_rows > NUM_STEPS, "a new step")
        assert Run(folder / "demo").status == "live"
    assert not folder.exists()


def test_the_writer_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "telescope.testing.demo", str(folder), "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        writer.stdin.close()  # as the kernel does for a killed parent
        assert writer.wait(30) == 0
    assert not folder.exists()


def test_the_demo_shows_no_other_runs(capsys) -> None:
    assert main(["ui", "--demo", "runs/mine"]) == 2
    assert "Leave out --demo" in capsys.readouterr().err
