"""The layout of trainer ranks: which ranks train the same rows, and which send weights.

A batch is packed for the data-parallel ranks. With model parallelism several ranks work on the same rows, and together
they are one data-parallel rank. Imports no torch, because the driver distributes the rows.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from telescope.errors import ConfigError

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
"""Limit for one collective: longer than loading a model from a slow disk."""


@dataclass(slots=True, frozen=True)
class Layout:
    """The place of one rank among all ranks."""

    data_rank: int
    """The share of a batch that this rank trains. Ranks with the same data rank get the same rows."""
    data_size: int
    """Number of shares, equal on all ranks."""
    reports: bool = True
    """Whether this rank adds its rows to the metrics and returns recorded tokens. Exactly one rank of each data rank
    does: one that has the logprobs."""
    sends_weights: bool = True
    """Whether `named_weights` yields full tensors on this rank. Must be True on rank 0. If False, only names and shapes
    have to be right."""

    @classmethod
    def of_neighbors(cls, rank: int, world_size: int, model_size: int) -> Layout:
        """Returns the layout in which each `model_size` consecutive ranks get the same rows."""
        return cls(rank // model_size, world_size // model_size, reports=rank % model_size == 0)


def check_layouts(layouts: Sequence[Layout]) -> None:
    """Checks the layouts of all ranks, in the order of the ranks. Raises `ConfigError` for a backend's mistake."""
    size = layouts[0].data_size
    reporting = sorted(layout.data_rank for layout in layouts if layout.reports)
    problem = None
    if any(layout.data_size != size for layout in layouts):
        problem = f"data_size differs between ranks: {[layout.data_size for layout in layouts]}"
    elif any(not 0 <= layout.data_rank < size for layout in layouts):
        problem = f"data_rank is not in [0, {size}) on every rank: {[layout.data_rank for layout in layouts]}"
    elif reporting != list(range(size)):
        problem = f"one rank must report for each of {size} data ranks, and those that report have {reporting}"
    elif not layouts[0].sends_weights:
        problem = "rank 0 does not send weights"
    if problem is not None:
        raise ConfigError(f"train_backend: the backend's layout is wrong: {problem}. Correct its `layout`")
