"""A fingerprint of a tensor's bits that parts of the tensor can be asked for separately and then added up.

The engine holds a trainer's tensor as a slice of a fused parameter, cut further over tensor-parallel ranks. A
fingerprint that adds up lets every rank hash what it holds, at the position it has in the whole, and the sums are
compared with the hash of the tensor that was sent; nobody needs to know how the other side cuts.

With b_ij the mixed bits of element (i, j) of a tensor seen as a matrix (first dimension by the rest), it is

    sum_i r_i * sum_j s_j * b_ij   mod 2^64

where r and s are fixed pseudo-random odd 64-bit numbers (splitmix64 of the index): multilinear hashing (Carter and
Wegman, 1979). It depends on order and place: moved rows, exchanged columns and single flipped bits change it, except
with a probability around 2^-60. It guards against faults, not against an adversary.

Bits are taken after the values that no matrix kernel keeps apart are made one: the sign of zero counts as nothing,
and so do float32 and bfloat16 values below the smallest normal number (some CPU kernels flush them).

Slices: the part of a trainer's tensor that one worker of an engine holds in one of its parameters.

Owns the two records and the fingerprint of a slice. Which tensor lies where is `held` and `held_experts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements hashed at a time, by device: 512 KiB of int64 stay in a core's cache, 128 MiB outweigh a kernel launch."""

_MASK = (1 << 64) - 1
_ROW_SEED = 0x243F6A8885A308D3
_COLUMN_SEED = 0x13198A2E03707344

# dtype -> (integer view, bits to keep of an element's magnitude test, i.e. zero under this mask counts as 0)
_VIEWS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF),
}


def as_matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) under which a tensor of `shape` is hashed: the first dimension by the rest; a scalar is 1 x 1."""
    if not shape:
        return 1, 1
    return shape[0], math.prod(shape[1:])


def fingerprint(tensor: torch.Tensor) -> int:
    """Fingerprint of a whole tensor, in [0, 2^64). Raises `TypeError` for a dtype that weights do not travel in."""
    return partial_fingerprint(tensor)


@torch.no_grad()
def partial_fingerprint(part: torch.Tensor, row_offset: int = 0, column_offset: int = 0) -> int:
    """Share of the fingerprint that comes from `part`, whose first element is (row_offset, column_offset) of the whole.

    Shares of disjoint parts that cover a tensor add up, modulo 2^64, to the tensor's fingerprint.
    """
    if part.dtype not in _VIEWS:
        raise TypeError(f"no fingerprint for {part.dtype}; known: {sorted(str(d) for d in _VIEWS)}")
    rows, columns = as_matrix_shape(tuple(part.shape))
    if rows == 0 or columns == 0:
        return 0
    part_RC = part.detach().reshape(rows, columns)
    weight_R = _weights(rows, row_offset, _ROW_SEED, part.device)
    weight_C = _weights(columns, column_offset, _COLUMN_SEED, part.device)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    chunk_rows = max(1, CHUNK_ELEMENTS.get(part.device.type, CHUNK_ELEMENTS["cuda"]) // columns)
    for start in range(0, rows, chunk_rows):
        bits_RC = _bits(part_RC[start : start + chunk_rows])
        bits_RC *= weight_C
        total += (bits_RC.sum(dim=1) * weight_R[start : start + chunk_rows]).sum()
    return int(total.item()) & _MASK


def add_fingerprints(parts: list[int]) -> int:
    """Sum of shares, modulo 2^64."""
    return sum(parts) & _MASK


def to_hex(value: int) -> str:
    """16 hex digits, the form in which fingerprints are reported (JSON has no 64-bit integers)."""
    return f"{value:016x}"


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Elements as int64, with zeros of either sign (and flushed subnormals) as 0.

    The bits are spread over the word first: those of typical weights end in zeros (bfloat16 values in float32, round
    numbers), and so would every product of them.
    """
    view, magnitude = _VIEWS[values.dtype]
    bits = values.contiguous().view(view)
    bits = torch.where((bits & magnitude) == 0, 0, bits).to(torch.int64)
    bits *= _signed(0x9E3779B97F4A7C15)
    bits ^= _shift_right(bits, 32)
    return bits


def _weights(count: int, offset: int, seed: int, device: torch.device) -> torch.Tensor:
    """Odd splitmix64 numbers of the indices offset .. offset + count, int64 [count] (arithmetic wraps)."""
    x = torch.arange(offset, offset + count, dtype=torch.int64, device=device)
    x = x * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift_right(x, 31)) | 1


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64 (torch's own shift keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return value - (1 << 64) if value >= 1 << 63 else value


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
