"""A killed trainer rank is replaced on its GPU, and the run continues from a checkpoint. Run by hand on two GPUs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from tests.e2e.kills import kill, rows
from tests.e2e.train_command import Command
from tests.processes import free_port

from telescope.record.reader import Run
from telescope.tiny_model.cache import ensure_tiny_model

pytestmark = pytest.mark.gpu

NUM_STEPS = 16
FLAGS = {
    "device": "cuda", "trainer_num_workers": 1, "inference_threads": "null", "trainer_threads": "null",
    "ray_inference_cpus_per_worker": 4, "ray_trainer_cpus_per_worker": 4, "checkpoint_every": 2, "evals": "[]",
    "weight_probe_every": 1, "lr_scheduler": "linear", "save_final_model": "false",
}  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a rank and a server, each with a GPU of its own")
def test_a_killed_rank_is_replaced_and_a_finished_run_resumed_with_weights_sent_over_nccl(tmp_path: Path) -> None:
    model = ensure_tiny_model()
    command = start(model, tmp_path, NUM_STEPS)
    for count in (1, 2):
        wait_for_checkpoint_after(command, newest_checkpoint(command))
        assert kill(command.process.pid, "rank")
        command.wait_for("restart", command.printed(f"(restart {count} of 3)"), 300)
    assert command.process.wait(timeout=300) == 0, command.log.read_text()[-5000:]
    assert len(Run(command.run_dir).attempts()) == 3

    resumed = start(model, tmp_path, NUM_STEPS + 4, "--resume_from_checkpoint=true")
    assert resumed.process.wait(timeout=400) == 0, resumed.log.read_text()[-5000:]
    run = Run(resumed.run_dir)
    steps = {row["step"]: row["metrics"] for row in rows(run, "steps")}
    assert steps.keys() == set(range(NUM_STEPS + 4))
    trained = [row["group_id"] for row in rows(run, "groups", "kept")]
    assert len(trained) == len(set(trained)) == 16 * (NUM_STEPS + 4), "each prompt was trained once"
    log = (resumed.run_dir / "logs" / "driver.log").read_text()
    unverified = [n for n in range(NUM_STEPS + 5) if f"weights of version {n} verified on server 0" not in log]
    assert not unverified, "each sync was verified"


def start(model: Path, folder: Path, num_steps: int, *flags: str) -> Command:
    fields = [f"--{name}={value}" for name, value in FLAGS.items()]
    return Command(model, folder, free_port(), *fields, *flags, number_of_steps=num_steps)


def newest_checkpoint(command: Command) -> int:
    folders = (command.run_dir / "checkpoints").glob("step_*")
    return max((int(folder.name.removeprefix("step_")) for folder in folders), default=-1)


def wait_for_checkpoint_after(command: Command, step: int) -> None:
    command.wait_for(f"checkpoint after step {step}", lambda: newest_checkpoint(command) > step, 400)
    time.sleep(0.5)
