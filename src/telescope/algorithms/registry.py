"""From the name in the configuration to the algorithm: `ALGORITHM` in the module of that name.

The names themselves, with what each allows beside it, are one line each in `telescope.config.algorithms`.
"""

from __future__ import annotations

import importlib

from telescope.algorithms.base import Algorithm
from telescope.config.algorithms import ALGORITHM_FACTS


def get_algorithm(name: str) -> Algorithm:
    """The algorithm called `name`. Raises `ValueError` naming the known ones."""
    if name not in ALGORITHM_FACTS:
        raise ValueError(f"algorithm {name!r} is not available: use one of {', '.join(ALGORITHM_FACTS)}")
    algorithm = importlib.import_module(f"telescope.algorithms.{name}").ALGORITHM
    assert isinstance(algorithm, Algorithm)
    return algorithm
