"""Advantages and per-token losses. Pure functions on arrays and tensors; imports no torch."""

from telescope.algorithms.advantages import compute_advantages
from telescope.algorithms.base import Algorithm, TokenBatch, get_algorithm

__all__ = ["Algorithm", "TokenBatch", "compute_advantages", "get_algorithm"]
