"""Which scored samples are left out of training, and what is taken off a reward before it is compared with others.

Pure functions of a trajectory. All of it is off by default. A sample that is left out counts as masked: it keeps its
reward in the record and is in no statistic of its group. Samples are judged once, when they are scored, so that the
group's learning signal and its advantages see the same rewards.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from telescope.environments.worker_pool.messages import EnvironmentInfo
from telescope.errors import ConfigError
from telescope.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from telescope.config import TelescopeConfig

RewardRange = tuple[float | None, float | None]
"""Smallest and largest expected reward of an environment, None where not known."""


def normalized(reward: float, low: float | None, high: float | None) -> float:
    """The reward on a scale where `low` is 0 and `high` is 1; as it is where the range is not known or empty."""
    if low is None or high is None or high <= low:
        return reward
    return (reward - low) / (high - low)


def check_reward_ranges(config: TelescopeConfig, infos: Sequence[EnvironmentInfo]) -> None:
    """Raise ConfigError when `normalize_rewards` is on and an environment's range of rewards is not known or empty.

    `infos` is what the environment of each entry of the config says of itself, the entry's own range included.
    """
    if not config.normalize_rewards:
        return
    for entry, info in zip(config.environments, infos, strict=True):
        low, high = info.reward_min, info.reward_max
        if low is None or high is None or high <= low:
            raise ConfigError(
                f"normalize_rewards is true, but the rewards of environment {entry.name!r} have no range to be mapped "
                f"from (reward_min is {low}, reward_max is {high}). Set both in its entry of environments, the smaller "
                "one first, or normalize_rewards to false."
            )


@dataclass(frozen=True)
class SampleFilters:
    """The filters and the penalty of a run. None switches a filter off."""

    overlong: bool = False
    compression_threshold: float | None = None
    rare_token: int | None = None
    """Token ids above it are rare."""
    rare_logprob: float = -math.inf
    """A rare token that was sampled below this logprob makes its answer gibberish."""
    penalty_factor: float = 0.0
    penalty_from: int = 0
    """Tokens of an answer from which the penalty grows."""
    penalty_buffer: int = 1
    """Tokens over which it grows to its full amount."""

    @classmethod
    def from_config(cls, config: Any, vocab_size: int | None = None) -> SampleFilters:
        """The filters of a `TelescopeConfig`. `vocab_size` is needed for `filter_gibberish` alone."""
        rare_logprob = -math.inf
        if config.filter_gibberish:
            assert vocab_size is not None, "filter_gibberish compares with a uniform choice over the vocabulary"
            rare_logprob = -math.log(vocab_size) - config.gibberish_logprob_offset
        return cls(
            overlong=config.filter_overlong,
            compression_threshold=config.repetition_compression_threshold if config.filter_repetition else None,
            rare_token=config.gibberish_token_threshold if config.filter_gibberish else None,
            rare_logprob=rare_logprob,
            penalty_factor=config.overlong_penalty_factor,
            penalty_from=config.max_tokens - config.overlong_buffer_tokens,
            penalty_buffer=config.overlong_buffer_tokens,
        )

    def judge(self, sample: Trajectory, scale: RewardRange) -> None:
        """Write into a scored sample whether it is left out, its penalty, and the reward that it is trained with.

        `scale` is its environment's range of rewards, (None, None) to leave rewards as they are. The penalty is taken
        off the scaled reward, so that it means the same in every environment.
        """
        sample.left_out = self.reason_to_leave_out(sample)
        sample.penalty = self.overlong_penalty(sample)
        sample.training_reward = normalized(sample.total_reward, *scale) - sample.penalty

    def reason_to_leave_out(self, sample: Trajectory) -> str | None:
        """`overlong`, `repetition` or `gibberish`, the first that applies; None for a sample that is trained on.

        Overlong: the last answer was cut off, so its reward says nothing of what it would have been (DAPO, arXiv
        2503.14476). Repetition: the text compresses too well (the criterion of Whisper, arXiv 2212.04356). Gibberish: a
        rare token that was far less likely than a uniform choice (CWM, arXiv 2510.02387).
        """
        if self.overlong and sample.stop_reason == "length":
            return "overlong"
        threshold = self.compression_threshold
        if threshold is not None and compression_ratio(sample.completion_text) > threshold:
            return "repetition"
        if self.rare_token is not None and self._is_gibberish(sample):
            return "gibberish"
        return None

    def _is_gibberish(self, sample: Trajectory) -> bool:
        return any(
            bool(((g.token_ids_N > self.rare_token) & (g.logprobs_N < self.rare_logprob)).any())
            for g in (turn.generation for turn in sample.turns)
        )

    def overlong_penalty(self, sample: Trajectory) -> float:
        """What is taken off the reward: 0 up to `overlong_buffer_tokens` before `max_tokens`, then linearly more, up to
        `overlong_penalty_factor` at `max_tokens` (DAPO, equation 13). Of several turns the longest counts.
        """
        if not self.penalty_factor:
            return 0.0
        longest = max((len(turn.generation.token_ids_N) for turn in sample.turns), default=0)
        return self.penalty_factor * min(max((longest - self.penalty_from) / self.penalty_buffer, 0.0), 1.0)


def compression_ratio(text: str) -> float:
    """Bytes of the text over bytes of its zlib compression; 0 for an empty one. Prose has 2 to 3, a loop over 10."""
    data = text.encode("utf-8", errors="replace")
    return len(data) / len(zlib.compress(data)) if data else 0.0
