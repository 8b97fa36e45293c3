"""Runs of agents as a person starts them: the tiny model learns to use a calculator, and to answer an SDK."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.train_command import ROOT, steps_of

from telescope.environments.calculator_agent.environment import CALL_CLOSE, CALL_OPEN
from telescope.environments.countdown.puzzles import parse
from telescope.record.reader import Run
from telescope.tiny_model.cache import ensure_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TIMEOUT_SECONDS = 600

FLAGS = """
--eval_before_training false --eval_after_training false --use_wandb false
--inference_base_port 20100
"""


def trained(folder: Path, config: str, num_steps: int, **model: Any) -> Run:
    """Returns the record of a run in which the reward rose."""
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "configs" / "examples" / config)]
    done = subprocess.run(
        [*command, f"--model={ensure_tiny_model(**model)}", f"--run_dir={folder / 'run'}", *FLAGS.split(),
         f"--number_of_steps={num_steps}"],
        cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = Run(folder / "run")
    rewards = [row["metrics"]["reward/all_groups/mean"] for row in steps_of(record)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    return record


def test_reward_rises_with_an_agent_that_uses_the_sdk_of_openai(tmp_path: Path) -> None:
    record = trained(tmp_path, "demo_agent.yaml", 24)
    samples = [row for row in record.table("samples").to_pylist() if row["status"] == "kept"]
    assert {row["num_turns"] for row in samples} == {1, 2}
    assert all(row["num_turns"] == 1 or row["divergences"] == [] for row in samples)
    assert record.sql("select count(*) as n from samples where failure_kind is not null").to_dicts() == [{"n": 0}]


def test_reward_rises_with_a_calculator_that_the_model_calls(tmp_path: Path) -> None:
    record = trained(tmp_path, "demo_calculator_agent.yaml", 12, task="calculator_agent")
    turns: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(record.table("turns").to_pylist(), key=lambda row: row["turn"]):
        turns[row["sample_id"]].append(row)
    right = [row for row in record.table("samples").to_pylist() if row["status"] == "kept" and row["reward"] == 1.0]
    assert {row["num_turns"] for row in right} >= {2, 3}
    for sample in right:
        conversation = turns[sample["sample_id"]]
        assert [row["role"] for row in conversation] == ["assistant", "tool"] * (sample["num_turns"] - 1) + [
            "assistant"
        ]
        for call, reply in zip(conversation[::2], conversation[1::2], strict=False):
            expression = call["text"].removeprefix(CALL_OPEN).removesuffix(CALL_CLOSE)
            assert reply["text"] == str(parse(expression).value())
        assert sample["divergences"] == []
