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

from telescope.environments.types import EnvironmentInfo
from telescope.errors import ConfigError
from telescope.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from telescope.config import TelescopeConfig


def check_reward_ranges(config: TelescopeConfig, infos: Sequence[EnvironmentInfo]) -> None:
    """Raises ConfigError for `normalize_rewards` without a known reward range. `infos` has one per environment."""
    if not config.normalize_rewards:
        return
    for entry, info in zip(config.environments, infos, strict=True):
        low, high = info.reward_min, info.reward_max
        if low is None or high is None or high <= low:
            raise ConfigError(
                f"normalize_rewards is true, but environment {entry.name!r} has no valid reward range (reward_min is "
                f"{low}, reward_max is {high}). Set both in its entry of environments, with reward_min below "
                "reward_max, or set normalize_rewards: false."
            )


@dataclass(frozen=True)
class SampleFilters:
    """The filters and the penalty of a run. None disables a filter."""

    overlong: bool = False
    compression_threshold: float | None = None
    rare_token: int | None = None
    """Token ids above this are rare."""
    rare_logprob: float = -math.inf
    """A completion is gibberish if it has a rare token with a logprob below this."""
    penalty_factor: float = 0.0
    penalty_from: int = 0
    """Completion length, in tokens, from which the penalty grows."""
    penalty_buffer: int = 1
    """Tokens over which the penalty grows to its full amount."""

    @classmethod
    def from_config(cls, config: Any, vocab_size: int | None = None) -> SampleFilters:
        """Creates the filters of a `TelescopeConfig`. Only `filter_gibberish` needs `vocab_size`."""
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
        if self.overlong and sample.stop_reason == "length":
            return "overlong"
        threshold = self.compression_threshold
        if threshold is not None and sample.compression_ratio > threshold:
            return "repetition"
        if self.rare_token is not None and any(
            ((s.token_ids_L > self.rare_token) & (s.engine_logprob_L < self.rare_logprob) & s.trained_L).any()
            for s in sample.sequences()
        ):
            return "gibberish"
        return None

    def overlong_penalty(self, sample: Trajectory) -> float:
        """Returns the penalty for a long completion (DAPO, equation 13).

        It is 0 up to `overlong_buffer_tokens` before `max_tokens`, then rises linearly to `overlong_penalty_factor` at
        `max_tokens`. The longest turn counts.
        """
        if not self.penalty_factor:
            return 0.0
        longest = sample.totals.longest_answer
        return self.penalty_factor * min(max((longest - self.penalty_from) / self.penalty_buffer, 0.0), 1.0)
