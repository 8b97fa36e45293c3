"""Slices: the part of a trainer's tensor that one worker of an engine holds in one of its parameters.

Owns the two records and the fingerprint of a slice. Which tensor lies where is `held` and `held_experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from telescope.weights.fingerprint import add_fingerprints, partial_fingerprint, to_hex


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a trainer tensor that one worker holds in one place.

    `rows` and `columns` are the part's range in the trainer's tensor (first dimension by the rest). `fingerprint` is
    the part's share of the tensor's fingerprint, in hex. `exact` is False when the held values are wider than the
    wire's dtype and do not convert without loss, so they cannot have come from it.
    """

    place: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    fingerprint: str
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Slice:
    """Where a trainer tensor lies in a parameter: rows from `held_row`, and its range in the trainer's tensor."""

    held_row: int
    rows: tuple[int, int]
    columns: tuple[int, int]


def fingerprint_slices(
    blocks: Iterable[tuple[int, torch.Tensor]], place: str, slices: Mapping[str, Slice], dtype: torch.dtype
) -> Iterator[tuple[str, Share]]:
    """Shares of all tensors in a parameter that is given as blocks of columns, each with its first column's number."""
    sums: dict[str, list[int]] = {name: [] for name in slices}
    exact = dict.fromkeys(slices, True)
    for first_column, block in blocks:
        for name, where in slices.items():
            part = block[where.held_row : where.held_row + where.rows[1] - where.rows[0]]
            cast = part.to(dtype)
            exact[name] &= part.dtype == dtype or bool((cast.to(part.dtype) == part).all())
            sums[name].append(partial_fingerprint(cast, where.rows[0], where.columns[0] + first_column))
    for name, where in slices.items():
        yield (
            name,
            Share(place, where.rows, where.columns, to_hex(add_fingerprints(sums[name])), exact[name]),
        )
