"""`telescope train` as a person runs it: a process of its own, ended by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from telescope.record.reader import Run

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
MARK = "TELESCOPE_TEST_MARK"
"""An environment variable that every process of a run inherits, so that none can be left behind unseen."""


class Command:
    """A running `train.py` on the demo's config, and every process that descends from it."""

    def __init__(self, model: Path, folder: Path, port: int) -> None:
        self.run_dir = folder / "run"
        self.log = folder / "output.txt"
        self.mark = uuid.uuid4().hex
        self.known: dict[int, str] = {}
        """Every process of the family that was ever seen, by its id, with its start time."""
        command = [sys.executable, str(ROOT / "train.py"), "--config", "configs/examples/demo_countdown.yaml"]
        command += [f"--model={model}", f"--run_dir={self.run_dir}", f"--inference_base_port={port}"]
        command += ["--use_wandb=false", "--number_of_steps=500", "--eval_before_training=false"]
        environment = {**os.environ, MARK: self.mark}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            state = f"processes: {self.family()}; output:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"no {what} within {seconds:g} s; {state}"
            time.sleep(0.2)

    def says(self, text: str) -> Callable[[], bool]:
        def said() -> bool:
            assert self.process.poll() is None, f"the command ended early:\n{self.log.read_text()[-3000:]}"
            return text in self.log.read_text()

        return said

    def family(self) -> list[str]:
        """Command lines of all processes that carry the mark, or descend from one that does or did."""
        alive: dict[int, tuple[int, str, bool, str]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state, parent, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
                marked = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                if state not in "ZX":
                    line = (entry / "cmdline").read_text().replace("\0", " ")[:120]
                    alive[int(entry.name)] = int(parent), rest[17], marked, line
            except OSError:
                continue  # it has just ended
        self.known = {pid: start for pid, start in self.known.items() if pid in alive and alive[pid][1] == start}
        num_known = -1
        while num_known != len(self.known):
            num_known = len(self.known)
            self.known |= {
                p: start for p, (parent, start, marked, _) in alive.items() if marked or parent in self.known
            }
        return [alive[pid][3] for pid in self.known]

    def listens_on(self) -> set[str]:
        """The addresses on which processes of the family take TCP connections."""
        self.family()
        found = set()
        for pid in self.known:
            try:
                connections = psutil.Process(pid).net_connections("tcp")
            except psutil.NoSuchProcess:
                continue
            found |= {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN}
        return found

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


def test_ctrl_c_finishes_cleanly_and_leaves_no_process_behind(tiny_model: Path, tmp_path: Path) -> None:
    command = Command(tiny_model, tmp_path, 18610)
    try:
        command.wait_for("second step", command.says("step 2/500"), 240)
        assert len(command.family()) > 5, "Ray, vLLM, trainer and environment workers carry the mark"
        command.interrupt()
        assert command.process.wait(timeout=90) == 130
    finally:
        command.process.kill()
    command.wait_for("end of every process", lambda: not command.family(), 20)
    summary = json.loads((command.run_dir / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["steps"] >= 2
    run = Run(command.run_dir)
    assert run.status == "stopped"
    assert run.table("steps").num_rows == summary["steps"]


def test_a_second_ctrl_c_ends_at_once_and_leaves_no_process_behind(tiny_model: Path, tmp_path: Path) -> None:
    command = Command(tiny_model, tmp_path, 18620)
    try:
        command.wait_for("start of the workers", command.says("starting the trainer"), 120)
        command.wait_for("vLLM process", lambda: any("vllm" in line for line in command.family()), 60)
        command.interrupt()
        time.sleep(0.3)
        command.interrupt()
        assert command.process.wait(timeout=15) == 130
    finally:
        command.process.kill()
    command.wait_for("end of every process", lambda: not command.family(), 30)


@pytest.mark.parametrize(
    ("phase", "process"), [("starting Ray", "raylet"), ("starting the trainer", "vllm")], ids=["in Ray", "in vLLM"]
)
def test_a_driver_that_is_killed_while_something_starts_leaves_no_process_behind(
    tiny_model: Path, tmp_path: Path, phase: str, process: str
) -> None:
    command = Command(tiny_model, tmp_path, 18630)
    try:
        command.wait_for(phase, command.says(phase), 120)
        command.wait_for(f"{process} process", lambda: any(process in line for line in command.family()), 60)
        time.sleep(1.0)  # into its imports
        assert len(command.family()) > 3
    finally:
        command.process.kill()
    command.process.wait(timeout=5)
    command.wait_for("end of every process", lambda: not command.family(), 10)


def test_a_run_listens_on_loopback_only_and_leaves_no_process_behind_when_its_driver_is_killed(
    tiny_model: Path, tmp_path: Path
) -> None:
    command = Command(tiny_model, tmp_path, 18640)
    try:
        command.wait_for("first step", command.says("step 1/500"), 400)
        assert len(command.family()) > 8
        assert command.listens_on() == {"127.0.0.1"}
    finally:
        command.process.kill()
    command.process.wait(timeout=5)
    command.wait_for("end of every process", lambda: not command.family(), 10)
