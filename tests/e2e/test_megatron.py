"""A run whose model is divided over two Megatron ranks learns, and its checkpoint is a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.train_command import Command, steps_of

from telescope.orchestrator.conversion import convert

pytestmark = pytest.mark.e2e

FLAGS = """
--train_backend megatron --megatron_tensor_parallel_size 2 --eval_after_training false --weight_probe_every 1
"""
ENOUGH_TO_LEARN = 16


@pytest.mark.parametrize("num_steps", [2, pytest.param(ENOUGH_TO_LEARN, marks=pytest.mark.slow)])
def test_a_model_divided_over_two_ranks_is_sampled_as_it_is_trained(
    tiny_model: Path, tmp_path: Path, num_steps: int
) -> None:
    flags = [*FLAGS.split(), f"--checkpoint_every={num_steps}"]
    steps = steps_of(Command(tiny_model, tmp_path, 20200, *flags, number_of_steps=num_steps).finish())
    if num_steps == ENOUGH_TO_LEARN:
        rewards = [row["metrics"]["reward/all_groups/mean"] for row in steps]
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05, rewards
    # Before the first update both sides have the same weights: engine and trainer agree up to rounding.
    assert steps[0]["metrics"]["mismatch/logprob_difference_mean"] < 1e-5

    log = (tmp_path / "run" / "logs" / "inference-0.log").read_text()
    assert "Failed to load weights" not in log, "a warning at every sync of a healthy run"

    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert json.loads((checkpoint / "meta.json").read_text())["train_backend"] == "megatron"
    convert(checkpoint, tmp_path / "converted")
    final = tmp_path / "run" / "model" / "model.safetensors"
    found, wanted = load_file(tmp_path / "converted" / "model.safetensors"), load_file(final)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.slow
def test_a_run_goes_on_with_another_division_of_the_model(tiny_model: Path, tmp_path: Path) -> None:
    divided = (
        "--train_backend megatron --megatron_tensor_parallel_size 2 --checkpoint_every 2 --eval_after_training false"
    )
    Command(tiny_model, tmp_path, 20210, *divided.split(), number_of_steps=2).finish()
    flags = ("--megatron_tensor_parallel_size", "1", "--megatron_use_distributed_optimizer", "true")
    steps = steps_of(Command(tiny_model, tmp_path, 20210, *flags, number_of_steps=4, resume=True).finish())
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    # The servers have the weights that the ranks loaded.
    assert steps[2]["metrics"]["mismatch/logprob_difference_mean"] < 1e-5
