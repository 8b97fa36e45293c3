"""`telescope train` that is interrupted or killed, as a process of its own."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.e2e.train_command import Command

from telescope.orchestrator.checkpoints import CheckpointFolder
from telescope.record.reader import Run

pytestmark = pytest.mark.e2e


def test_a_second_ctrl_c_ends_at_once_and_leaves_no_process_behind(tiny_model: Path, tmp_path: Path) -> None:
    command = Command(tiny_model, tmp_path, 18620)
    try:
        command.wait_for("start of the workers", command.says("starting the trainer"), 300)
        command.wait_for("vLLM process", lambda: any("vllm" in line for line in command.family()), 120)
        command.interrupt()
        time.sleep(0.3)
        command.interrupt()
        assert command.process.wait(timeout=60) == 130
    finally:
        command.process.kill()
    command.wait_for("end of every process", lambda: not command.family(), 30)


def test_ctrl_c_while_ray_starts_does_not_wait_for_ray(tiny_model: Path, tmp_path: Path) -> None:
    command = Command(tiny_model, tmp_path, 18650)
    try:
        command.wait_for("start of Ray", command.says("starting Ray"), 120)
        command.wait_for("GCS", lambda: any("gcs_server" in line for line in command.family()), 60)
        command.interrupt()
        assert command.process.wait(timeout=30) == 130
    finally:
        command.process.kill()
    command.wait_for("end of every process", lambda: not command.family(), 20)
    assert json.loads((command.run_dir / "summary.json").read_text())["status"] == "stopped"


@pytest.mark.parametrize(
    ("phase", "process"),
    [
        pytest.param("starting Ray", "raylet", id="in Ray", marks=pytest.mark.slow),
        pytest.param("starting the trainer", "vllm", id="in vLLM"),
    ],
)
def test_a_driver_that_is_killed_while_something_starts_leaves_no_process_behind(
    tiny_model: Path, tmp_path: Path, phase: str, process: str
) -> None:
    command = Command(tiny_model, tmp_path, 18630)
    try:
        command.wait_for(phase, command.says(phase), 300)
        command.wait_for(f"{process} process", lambda: any(process in line for line in command.family()), 120)
        time.sleep(1.0)  # into its imports
        assert len(command.family()) > 3
    finally:
        command.process.kill()
    command.process.wait(timeout=30)
    command.wait_for("end of every process", lambda: not command.family(), 30)


@pytest.mark.slow
def test_a_driver_that_is_killed_while_it_trains_leaves_no_process_behind_and_its_run_continues(
    tiny_model: Path, tmp_path: Path
) -> None:
    command = Command(tiny_model, tmp_path, 18640, "--checkpoint_every=1")
    checkpoints = CheckpointFolder(command.run_dir / "checkpoints")
    try:
        command.wait_for("second checkpoint", lambda: len(checkpoints.steps()) > 1, 400)
        assert len(command.family()) > 8
    finally:
        command.process.kill()
    command.process.wait(timeout=30)
    command.wait_for("end of every process", lambda: not command.family(), 30)
    last = checkpoints.steps()[-1]
    flags = ("--eval_after_training=false",)
    resumed = Command(tiny_model, tmp_path, 18640, *flags, number_of_steps=last + 2, resume=True)
    try:
        assert resumed.process.wait(timeout=400) == 0
    finally:
        resumed.process.kill()
    run = Run(command.run_dir)
    steps = [(row["step"], row["attempt"]) for row in run.table("steps").to_pylist()]
    assert sorted(steps) == [(step, 1 if step < last else 2) for step in range(last + 2)]
    assert checkpoints.steps()[-1] == last + 2
