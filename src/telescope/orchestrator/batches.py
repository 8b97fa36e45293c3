"""From finished groups to what the trainer's ranks compute: advantages, micro-batches.

Pure and numpy only; the orchestrator runs it on a thread. Group statistics are over trajectories: one whose turns are
samples of their own (`interleaved_rollouts: false`) counts once, and all of them are trained with its advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from telescope.algorithms import compute_advantages
from telescope.config import TelescopeConfig
from telescope.orchestrator.groups import Group
from telescope.trainer.batch import StepInput
from telescope.trainer.packing import pack_step, packing_stats, truncate_to


@dataclass
class Batch:
    """The groups of one training step and what each trainer rank computes.

    `advantages` are of the usable samples of `groups`, in their order.
    """

    groups: list[Group]
    advantages: np.ndarray
    inputs: list[StepInput]
    packing: dict[str, float]
    """Shares of padding and of dummy tokens, how unevenly the ranks are loaded, and what was cut off."""


@dataclass(slots=True)
class _ScoredTrajectory:
    """What advantages are computed from."""

    group_id: int
    reward: float
    num_trained: int
    advantage: float = 0.0


def form_batch(config: TelescopeConfig, groups: list[Group], step: int) -> Batch:
    """Pack the groups of training step `step`."""
    trajectories, scored, samples = [], [], []
    for group in groups:
        for trajectory, reward in zip(group.usable_samples, group.training_rewards_n.tolist(), strict=True):
            trajectories.append(trajectory)
            scored.append(_ScoredTrajectory(group.group_id, reward, trajectory.num_completion_tokens))
    advantages = compute_advantages(scored, config.algorithm, config.advantage_norm)
    for trajectory, score in zip(trajectories, scored, strict=True):
        for sample in trajectory.to_train_samples():
            sample.reward, sample.advantage = score.reward, score.advantage
            samples.append(sample)
    packing: dict[str, float] = {}
    if config.overlong_samples == "truncate":
        packing["packing/truncated_samples"] = sum(sample.length > config.seq_len for sample in samples)
        samples, packing["packing/truncated_tokens"] = truncate_to(samples, config.seq_len)
    inputs = pack_step(
        samples,
        step=step,
        version=step,  # a step starts from the weights of all steps before it
        seq_len=config.seq_len,
        num_ranks=config.trainer_num_workers,
        pad_to_multiple_of=config.pad_to_multiple_of,
        num_minibatches=config.number_of_minibatches,
    )
    stats = packing_stats(inputs)
    packing |= {
        "packing/padding_share": stats.padding_share,
        "packing/dummy_share": stats.dummy_share,
        "packing/imbalance": stats.imbalance,
    }
    return Batch(groups, np.asarray(advantages), inputs, packing)
