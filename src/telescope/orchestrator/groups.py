"""Defines a group, which is one prompt and its samples until training or discard.

Owns the state of a group, the decision whether it carries a learning signal, and the forming of batches from finished
groups: advantages and micro-batches, pure and numpy only. Group statistics are over trajectories. A trajectory whose
turns are separate samples (`interleaved_rollouts: false`) counts once, and all its samples have its advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from telescope.algorithms import compute_advantages
from telescope.config import TelescopeConfig
from telescope.environments.types import PreparedPrompt
from telescope.orchestrator.prompt_sampler import SampledPrompt
from telescope.rollout.pool import RunningGroup
from telescope.rollout.trajectory import Trajectory
from telescope.trainer.batch import StepInput, TrainSample
from telescope.trainer.packing import pack_step, packing_stats, truncate_to
from telescope.utils.text import single_line


@dataclass
class Group:
    """One opened prompt. `start_version` is the policy version when it was opened, `opened_at` a wall-clock time."""

    sampled_prompt: SampledPrompt
    environment: str
    prompt: PreparedPrompt
    size: int
    start_version: int
    opened_at: float
    finished_at: float | None = None
    samples: list[Trajectory] = field(default_factory=list)
    """Finished samples: scored, masked or cancelled."""
    running: RunningGroup | None = None
    """The samples that a rollout worker is generating, or None."""
    num_requeues: int = 0
    """How often the prompt was requeued because its group became too old."""
    withdrawn: bool = False
    """Whether the group was removed because it became too old. Its running samples end as cancelled."""
    requeued: bool = False
    """Whether the group is withdrawn and its prompt is requeued."""
    prompt_key: str = ""
    """Key of the prompt in the record's table `prompts`, once this attempt has written it."""

    @property
    def group_id(self) -> int:
        return self.sampled_prompt.n

    def sample_id(self, index: int) -> str:
        """Returns the id of sample `index`, which is unique for every opening."""
        suffix = f"-r{self.num_requeues}" if self.num_requeues else ""
        return f"{self.group_id}-{index}{suffix}"

    def oldest_version(self) -> int | None:
        """Returns the policy version of the oldest trained token of this group. None while it has none.

        Masked samples are not trained. A running sample has the version that its worker last reported.
        """
        ended = [s.totals.version_range[0] for s in self.samples if s.is_usable]
        versions = [version for version in ended if version >= 0]
        running = self.running.samples.values() if self.running is not None else ()
        under_way = (sample.oldest_version for sample in running)
        return min((*versions, *(version for version in under_way if version is not None)), default=None)

    @property
    def is_finished(self) -> bool:
        return len(self.samples) == self.size

    @property
    def usable_samples(self) -> list[Trajectory]:
        """Scored samples without masked ones, ordered by index."""
        return sorted((s for s in self.samples if s.is_usable), key=lambda s: s.sample_index)

    @property
    def rewards_n(self) -> np.ndarray:
        """Total reward of each usable sample, float64 [n]."""
        return np.array([s.total_reward for s in self.usable_samples], dtype=np.float64)

    @property
    def training_rewards_n(self) -> np.ndarray:
        """Training rewards of the usable samples, for their advantages, float64 [n]."""
        samples = self.usable_samples
        rewards = [s.total_reward if s.training_reward is None else s.training_reward for s in samples]
        return np.array(rewards, dtype=np.float64)

    def why_useless(self) -> tuple[str, str | None] | None:
        """Returns why training on this group cannot change the policy, and the sign of its rewards if they share one.

        None if it can. Masked samples do not count. A group with one sample has no baseline, so it is never
        "zero advantage". Training rewards may be equal where rewards differ, by a penalty.
        """
        training_n, rewards_n = self.training_rewards_n, self.rewards_n
        if len(training_n) == 0:
            return "all_masked", None
        if len(training_n) > 1 and np.all(training_n == training_n[0]) and not self._chats_differ():
            signs = {"all_zero": rewards_n == 0, "all_positive": rewards_n > 0, "all_negative": rewards_n < 0}
            return "zero_advantage", next((kind for kind, holds_n in signs.items() if holds_n.all()), None)
        return None

    def _chats_differ(self) -> bool:
        """Returns whether the samples differ in the reward of a conversation that has its own reward."""
        rewards: dict[str, set[float]] = {}
        for sample in self.usable_samples:
            for chat, reward in sample.chat_rewards.items():
                rewards.setdefault(chat, set()).add(reward)
        return any(len(of_chat) > 1 for of_chat in rewards.values())


@dataclass
class DiscardStreak:
    """Counts discards since the last usable group. At the limit, the run stops with a diagnosis."""

    limit: int
    count: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    last_rewards: list[float] = field(default_factory=list)
    last_failure: str = ""

    def usable(self) -> None:
        self.count, self.last_failure = 0, ""
        self.kinds.clear()

    def discarded(self, kind: str, rewards_n: np.ndarray) -> None:
        self.count += 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if len(rewards_n):
            self.last_rewards = [*self.last_rewards[-4:], float(rewards_n[0])]

    @property
    def is_over(self) -> bool:
        """Whether the last discard has just reached the limit."""
        return self.count == self.limit

    @property
    def is_half_over(self) -> bool:
        """Whether the last discard has just reached half the limit, when a person can still change something."""
        return self.count == self.limit // 2

    def diagnosis(self, num_steps: int) -> str:
        """Explains why no group can be trained after `num_steps` training steps, with the observed rewards."""
        kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(self.kinds.items()))
        if self.kinds.get("too_slow", 0) > self.count / 2:
            return (
                f"{self.count} consecutive groups were discarded ({kinds}). Most were sampled three times and became "
                "older than max_off_policy_steps each time: answers take longer than that many training steps. "
                "Raise max_off_policy_steps, lower max_tokens, or give inference more servers."
            )
        if self.kinds.get("all_masked", 0) > self.count / 2:
            failure = single_line(self.last_failure).removesuffix(".")
            return (
                f"{self.count} consecutive groups were discarded ({kinds}). In most of them every sample was masked: "
                "it failed, or a filter removed it. "
                + (f"The last failure: {failure}. " if failure else "")
                + "The table `samples` has `reason` and `failure_message` of each."
            )
        same = (
            f"{self.count} consecutive groups carried no learning signal ({kinds}; last rewards {self.last_rewards}). "
            "Every answer to a prompt got the same reward"
        )
        if num_steps:
            return (
                f"{same}, which was not so before: training has ruined the policy, as with a learning_rate that is too "
                "high, or the task has become too easy for it. Read the newest answers. If they are broken, continue "
                "from a checkpoint before that (resume_from_checkpoint) with a lower learning_rate; otherwise change "
                "the task, or raise group_size."
            )
        return (
            f"{same}: the task is too hard or too easy for this model, the reward never varies, or max_tokens cuts "
            "every answer off. Change the task or the reward, raise group_size, or set discard_group_zero_advantage: "
            "false to train anyway."
        )


@dataclass
class Batch:
    """The groups of a step, each rank's inputs, and the advantages of the groups' usable samples, in order."""

    groups: list[Group]
    advantages: np.ndarray
    inputs: list[StepInput]
    packing: dict[str, float]
    """Metrics: shares of padding and dummy tokens, imbalance of the ranks, and truncation."""

    @property
    def num_trained_tokens(self) -> int:
        """Returns the number of tokens with a loss."""
        return sum(minibatch.num_trained_tokens for minibatch in self.inputs[0].minibatches)


@dataclass(slots=True)
class _Scored:
    """Input of the advantage computation."""

    group_id: int
    reward: float
    num_trained: int
    advantage: float = 0.0


def recorded_samples(samples: Sequence[TrainSample], wanted: int | str) -> frozenset[str]:
    """Returns ids of evenly spread samples whose tokens are recorded, as many as `record_tokens` says."""
    ids = [sample.sample_id for sample in samples if sample.num_trained]
    count = {"none": 0, "all": len(ids)}.get(str(wanted), wanted)
    assert isinstance(count, int)
    count = min(count, len(ids))
    return frozenset(ids[place * len(ids) // count] for place in range(count))


def form_batch(config: TelescopeConfig, groups: list[Group], step: int, *, num_ranks: int, packs: bool = True) -> Batch:
    """Packs the groups of training step `step` for `num_ranks` data-parallel ranks, as `pack_step` does."""
    rollouts, scored = [], []
    for group in groups:
        for trajectory, reward in zip(group.usable_samples, group.training_rewards_n.tolist(), strict=True):
            sequences = trajectory.sequences()
            rollouts.append((trajectory, sequences))
            scored.append(_Scored(group.group_id, reward, sum(sample.num_trained for sample in sequences)))
    # A conversation with its own reward is compared with conversations of the same name, as a separate group.
    own_groups: dict[tuple[int, str], int] = {}
    own: dict[tuple[str, str], _Scored] = {}
    for trajectory, sequences in rollouts:
        for chat, reward in trajectory.chat_rewards.items():
            number = own_groups.setdefault((trajectory.group_id, chat), -1 - len(own_groups))
            num_trained = sum(sample.num_trained for sample in sequences if sample.chat == chat)
            own[trajectory.sample_id, chat] = _Scored(number, reward, num_trained)
    advantages = compute_advantages([*scored, *own.values()], config.algorithm, config.advantage_norm)[: len(scored)]
    samples: list[TrainSample] = []
    for (trajectory, sequences), of_rollout in zip(rollouts, scored, strict=True):
        for sample in sequences:
            score = own.get((trajectory.sample_id, sample.chat), of_rollout)
            sample.reward, sample.advantage = score.reward, score.advantage
        samples += [sample for sample in sequences if sample.num_trained or len(sequences) == 1]
    packing: dict[str, float] = {}
    if config.overlong_samples == "truncate":
        packing["packing/truncated_samples"] = sum(sample.length > config.seq_len for sample in samples)
        samples, packing["packing/truncated_tokens"] = truncate_to(samples, config.seq_len)
    inputs = pack_step(
        samples,
        step=step,
        version=step,  # step s starts from policy version s
        seq_len=config.seq_len,
        num_ranks=num_ranks,
        pad_to_multiple_of=config.pad_to_multiple_of,
        num_minibatches=config.number_of_minibatches,
        packs=packs,
    )
    recorded = recorded_samples(samples, config.record_tokens)
    for rank in inputs:
        rank.recorded = recorded
    return Batch(groups, np.asarray(advantages), inputs, packing | packing_stats(inputs))
