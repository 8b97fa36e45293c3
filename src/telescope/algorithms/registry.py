"""The algorithms by name. Adding one is a file beside this one and a line below."""

from __future__ import annotations

from telescope.algorithms.base import Algorithm
from telescope.algorithms.grpo import GRPO

ALGORITHMS: tuple[Algorithm, ...] = (GRPO,)


def get_algorithm(name: str) -> Algorithm:
    """The algorithm called `name`. Raises `ValueError` naming the known ones."""
    for algorithm in ALGORITHMS:
        if algorithm.name == name:
            return algorithm
    known = ", ".join(algorithm.name for algorithm in ALGORITHMS)
    raise ValueError(f"algorithm {name!r} is not available: use one of {known}")
