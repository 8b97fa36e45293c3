"""A run that trains adapters alone learns, and its servers compute what its trainer computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.train_command import Command, steps_of

from telescope.orchestrator.conversion import convert

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_STEPS = 14
FLAGS = """
--lora_rank 8 --learning_rate 2e-3 --eval_after_training false --checkpoint_every 14 --weight_probe_every 1
"""


@pytest.mark.parametrize("lora_sync", ["adapter", "merged"])
def test_reward_rises_when_adapters_alone_are_trained(tiny_model: Path, tmp_path: Path, lora_sync: str) -> None:
    command = Command(
        tiny_model, tmp_path, 20300, *FLAGS.split(), f"--lora_sync={lora_sync}", number_of_steps=NUM_STEPS
    )
    steps = [row["metrics"] for row in steps_of(command.finish())]
    rewards = [metrics["reward/all_groups/mean"] for metrics in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05, rewards
    # Of samples that the trainer's current weights sampled, as the servers hold them.
    differences = [
        step["mismatch/logprob_difference_max"] for step in steps if "mismatch/logprob_difference_max" in step
    ]
    assert len(differences) > 3
    assert max(differences) < 1e-4

    first = load_file(tiny_model / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in first.values())
    sent = [metrics["weight_sync/bytes"] for metrics in steps if "weight_sync/bytes" in metrics]
    assert len(sent) >= NUM_STEPS - 1
    assert all(size < 0.1 * num_bytes for size in sent) if lora_sync == "adapter" else set(sent) == {num_bytes}

    final = load_file(tmp_path / "run" / "model" / "model.safetensors")
    changed = {name for name, tensor in final.items() if not torch.equal(tensor, first[name])}
    assert changed == {name for name in first if name.endswith("_proj.weight")}, "norms, biases and tables are frozen"
    convert(tmp_path / "run" / "checkpoints" / f"step_{NUM_STEPS}", tmp_path / "converted")
    found = load_file(tmp_path / "converted" / "model.safetensors")
    assert found.keys() == final.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in final.items())
