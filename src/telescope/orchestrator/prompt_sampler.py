"""Samples prompts by number.

Prompt number n is a pure function of the seed and n.

n identifies a prompt in the ledger, in a checkpoint and in the record. The environment of prompt n is sampled by
weight; its items are visited without replacement and reshuffled each epoch. The result does not depend on earlier
calls, so resuming a run needs n only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CHUNK = 1024  # Prompts are sampled in chunks of this size. The results depend on it, so never change it.


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """Prompt number n, an item of an environment. `environment` is its index in the config."""

    n: int
    environment: int
    index: int
    epoch: int


@dataclass(frozen=True, slots=True)
class SamplerPosition:
    """Position of a run in the prompt sequence, for checkpoints.

    Every prompt below `next_draw` was trained, dropped or held out, except `unfinished`, which come first.
    """

    next_draw: int = 0
    unfinished: tuple[int, ...] = ()


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


class PromptSampler:
    """An endless sequence of prompts from environments of given sizes and weights."""

    def __init__(self, seed: int, sizes: Sequence[int], weights: Sequence[float], first_index: Sequence[int]) -> None:
        """Skips the first `first_index[e]` items of environment e (held out)."""
        self._seed = seed
        self._sizes = [size - first for size, first in zip(sizes, first_index, strict=True)]
        assert min(self._sizes) > 0, "all items of an environment are held out"  # refused by `check_eval_items`
        self._first = list(first_index)
        total = float(sum(weights))
        self._probabilities = np.array([weight / total for weight in weights])
        self._chunk_environments: list[np.ndarray] = []
        # counts[c][e]: prompts of environment e before chunk c
        self._counts: list[np.ndarray] = [np.zeros(len(sizes), dtype=np.int64)]
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        """The epoch of each environment that was last asked for, and its order of items."""

    def prompt(self, n: int) -> SampledPrompt:
        """Returns prompt number n >= 0."""
        chunk, offset = divmod(n, CHUNK)
        while len(self._chunk_environments) <= chunk:
            self._lay_out_next_chunk()
        in_chunk = self._chunk_environments[chunk]
        environment = int(in_chunk[offset])
        earlier = int(self._counts[chunk][environment] + np.count_nonzero(in_chunk[:offset] == environment))
        epoch, position = divmod(earlier, self._sizes[environment])
        index = self._first[environment] + int(self._order(environment, epoch)[position])
        return SampledPrompt(n, environment, index, epoch)

    def _lay_out_next_chunk(self) -> None:
        chunk = len(self._chunk_environments)
        rng = _generator(self._seed, 0, chunk)
        environments = rng.choice(len(self._sizes), size=CHUNK, p=self._probabilities)
        self._chunk_environments.append(environments)
        self._counts.append(self._counts[chunk] + np.bincount(environments, minlength=len(self._sizes)))

    def _order(self, environment: int, epoch: int) -> np.ndarray:
        if self._orders.get(environment, (-1,))[0] != epoch:  # n moves forward, so one epoch is enough
            order = _generator(self._seed, 1, environment, epoch).permutation(self._sizes[environment])
            self._orders[environment] = epoch, order
        return self._orders[environment][1]
