"""The algorithms by name. Adding one is a file beside this one and a line below."""

from __future__ import annotations

from telescope.algorithms.base import Algorithm
from telescope.algorithms.cispo import CISPO
from telescope.algorithms.dr_grpo import DR_GRPO
from telescope.algorithms.grpo import GRPO
from telescope.algorithms.gspo import GSPO
from telescope.algorithms.reinforce_pp import REINFORCE_PP
from telescope.algorithms.rloo import RLOO
from telescope.algorithms.sapo import SAPO

ALGORITHMS: tuple[Algorithm, ...] = (GRPO, RLOO, REINFORCE_PP, DR_GRPO, CISPO, GSPO, SAPO)


def get_algorithm(name: str) -> Algorithm:
    """The algorithm called `name`. Raises `ValueError` naming the known ones."""
    for algorithm in ALGORITHMS:
        if algorithm.name == name:
            return algorithm
    known = ", ".join(algorithm.name for algorithm in ALGORITHMS)
    raise ValueError(f"algorithm {name!r} is not available: use one of {known}")
