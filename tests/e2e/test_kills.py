"""Processes of `telescope train` are killed at random times: it trains what a run that was left alone does."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.e2e.kills import FLAGS, TARGETS, assert_trains_the_same, check_ledger, kill, rows
from tests.e2e.train_command import ROOT, Command

from telescope.record.reader import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_STEPS = 24
PORT = 18690
KILLS_PER_RUN = 5
NUM_RUNS = 4

kills = st.tuples(st.sampled_from(["driver", *TARGETS]), st.floats(0.0, 4.0), st.integers(0, 3))
"""Target, seconds after the last one, and which of several processes."""


def start(model: Path, folder: Path, *flags: str, num_steps: int = NUM_STEPS, **changes: Any) -> Command:
    fields = [f"--{name}={value}" for name, value in {**FLAGS, **changes}.items()]
    more = ["--evals=[]", "--trainer_max_restarts=100", "--save_final_model=false", *flags]
    return Command(model, folder, PORT, *fields, *more, number_of_steps=num_steps)


@pytest.fixture(scope="module")
def straight(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return start(tiny_model, tmp_path_factory.mktemp("straight")).finish()


@pytest.mark.timeout(3600)
@settings(max_examples=NUM_RUNS, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(plan=st.lists(kills, min_size=KILLS_PER_RUN, max_size=KILLS_PER_RUN))
def test_a_run_whose_processes_are_killed_at_any_time_trains_every_prompt_once(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, straight: Run, plan: list[tuple[str, float, int]]
) -> None:
    folder = tmp_path_factory.mktemp("killed")
    command = start(tiny_model, folder)
    try:
        for target, seconds, choice in plan:
            wait_until_it_trains(command)
            time.sleep(seconds)
            if command.process.poll() is not None:
                break
            if target != "driver":
                kill(command.process.pid, target, choice)
                continue
            command.process.kill()
            command.leaves_no_process()
            command = start(tiny_model, folder, "--resume_from_checkpoint=true")
        run = command.finish(900)
    finally:
        command.process.kill()
    assert_trains_the_same(run, straight)


@pytest.mark.timeout(1800)
def test_a_run_of_agents_whose_driver_is_killed_trains_every_prompt_once(tiny_model: Path, tmp_path: Path) -> None:
    agents = yaml.safe_load((ROOT / "configs" / "examples" / "demo_agent.yaml").read_text())["environments"]
    agents[0]["kwargs"]["agent"] = "checker"
    again = partial(start, tiny_model, tmp_path, num_steps=10, environments=json.dumps(agents), max_async_rollout=2)
    command = again()
    try:
        for _ in range(2):
            wait_until_it_trains(command)
            assert command.process.poll() is None, command.log.read_text()[-3000:]
            command.process.kill()
            command.leaves_no_process()
            command = again("--resume_from_checkpoint=true")
        run = command.finish()
    finally:
        command.process.kill()
    check_ledger(run)
    assert len(run.attempts()) == 3
    assert {row["num_turns"] for row in rows(run, "samples", "kept")} == {2}


def wait_until_it_trains(command: Command) -> None:
    """Waits for the loops and a checkpoint, or the end of the command."""

    def trains() -> bool:
        phases = [line for line in command.log.read_text().splitlines() if line.startswith("[")]
        saved = any((command.run_dir / "checkpoints").glob("step_*"))
        return command.process.poll() is not None or (saved and bool(phases) and phases[-1].endswith("] training"))

    command.wait_for("training", trains, 300)
