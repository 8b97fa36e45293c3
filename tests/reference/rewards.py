"""Rewards to advantages. Lists of floats; a group is a list of the rewards of its unmasked samples."""

from __future__ import annotations

from math import sqrt

EPSILON = 1e-4


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float]) -> float:
    """Of a sample: ddof = 1."""
    center = mean(values)
    return sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1))


def grpo(rewards: list[float]) -> list[float]:
    """DeepSeekMath (2402.03300), section 4.1.2, outcome supervision."""
    return [(r - mean(rewards)) / (deviation(rewards) + EPSILON) for r in rewards]


def rloo(rewards: list[float]) -> list[float]:
    """Back to Basics (2402.14740): the baseline is the mean of the others."""
    return [r - mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def dr_grpo(rewards: list[float]) -> list[float]:
    """Dr. GRPO (2503.20783): no division by the deviation."""
    return [r - mean(rewards) for r in rewards]


def of_group(rewards: list[float], algorithm: str) -> list[float]:
    """The choices that papers leave: a group of one keeps its reward, equal rewards give 0."""
    if len(rewards) == 1:
        return rewards
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    return {"rloo": rloo, "dr_grpo": dr_grpo, "reinforce_pp": dr_grpo}.get(algorithm, grpo)(rewards)


def of_batch(groups: list[list[float]], algorithm: str, norm: str) -> list[list[float]]:
    """Of a training batch. `batch`: REINFORCE++ (2501.03262), centered in the group, whitened over the batch."""
    if norm == "group":
        return [of_group(rewards, algorithm) for rewards in groups]
    centered = [of_group(rewards, "dr_grpo") for rewards in groups]
    flat = [a for group in centered for a in group]
    if len(flat) < 2 or len(set(flat)) == 1:
        return [[0.0] * len(group) for group in centered]
    whitened = [[(a - mean(flat)) / (deviation(flat) + EPSILON) for a in group] for group in centered]
    equal = [len(rewards) > 1 and len(set(rewards)) == 1 for rewards in groups]
    return [[0.0] * len(group) if no_signal else group for group, no_signal in zip(whitened, equal, strict=True)]


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int, factor: float) -> float:
    """The overlong penalty: DAPO (2503.14476), equation 13, with its sign turned and scaled by `factor`."""
    if num_tokens <= max_tokens - buffer:
        return 0.0
    if num_tokens <= max_tokens:
        return factor * (num_tokens - (max_tokens - buffer)) / buffer
    return factor
