"""Filters samples and computes the overlong penalty.

Pure functions of a trajectory, all off by default. A filtered sample counts as masked: its reward stays in the record,
but not in the statistics of its group. Each sample is filtered once, when it is scored, so that the group's learning
signal and advantages use the same rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from telescope.config.environments import distinct_names
from telescope.environments.types import EnvironmentInfo
from telescope.errors import ConfigError
from telescope.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from telescope.config import TelescopeConfig


def check_reward_ranges(config: TelescopeConfig, infos: Sequence[EnvironmentInfo]) -> None:
    """Raises ConfigError for `normalize_rewards` without a known reward range. `infos` has one per environment."""
    if not config.normalize_rewards:
        return
    for name, info in zip(distinct_names(config.environments), infos, strict=True):
        low, high = info.reward_min, info.reward_max
        if low is None or high is None or high <= low:
            raise ConfigError(
                f"normalize_rewards is true, but environment {name!r} has no valid reward range (reward_min is "
                f"{low}, reward_max is {high}). Set both in its entry of environments, with reward_min below "
                "reward_max, or set normalize_rewards: false."
            )


@dataclass(frozen=True)
class SampleFilters:
    """The filters and the penalty of a run. Only `filter_gibberish` needs `vocab_size`."""

    config: Any
    vocab_size: int | None = None

    def apply(self, sample: Trajectory, scale: tuple[float, float] = (0.0, 1.0)) -> None:
        """Sets a scored sample's filter, penalty and training reward.

        `scale` is the reward range that is scaled to 0..1, for `normalize_rewards` that of its environment. The penalty
        is subtracted from the scaled reward, so that it has the same weight in every environment.
        """
        sample.filtered_by = self.filter_reason(sample)
        sample.penalty = self.overlong_penalty(sample)
        low, high = scale
        sample.training_reward = (sample.total_reward - low) / (high - low) - sample.penalty

    def filter_reason(self, sample: Trajectory) -> str | None:
        """Returns the first filter that applies, `overlong`, `repetition` or `gibberish`, or None.

        Overlong: the last completion was cut off, so its reward is not meaningful (DAPO, arXiv 2503.14476).
        Repetition: the text compresses too well (the criterion of Whisper, arXiv 2212.04356).
        Gibberish: a rare token was far less likely than under a uniform choice (CWM, arXiv 2510.02387).
        """
        config = self.config
        if config.filter_overlong and sample.stop_reason == "length":
            return "overlong"
        if config.filter_repetition and sample.compression_ratio > config.repetition_compression_threshold:
            return "repetition"
        if config.filter_gibberish:
            assert self.vocab_size is not None
            least, rare = -math.log(self.vocab_size) - config.gibberish_logprob_offset, config.gibberish_token_threshold
            if any(
                ((s.token_ids_L > rare) & (s.engine_logprob_L < least) & s.trained_L).any() for s in sample.sequences()
            ):
                return "gibberish"
        return None

    def overlong_penalty(self, sample: Trajectory) -> float:
        """Returns the penalty for a long completion (DAPO, equation 13).

        It is 0 up to `overlong_buffer_tokens` before `max_tokens`, then rises linearly to `overlong_penalty_factor` at
        `max_tokens`. The longest turn counts.
        """
        factor, buffer = self.config.overlong_penalty_factor, self.config.overlong_buffer_tokens
        if not factor:
            return 0.0
        over = sample.totals.longest_answer - (self.config.max_tokens - buffer)
        return float(factor * min(max(over / buffer, 0.0), 1.0))
