"""Fingerprints of tensors. The fingerprints of a tensor's parts add up to its own.

An engine stores a trainer's tensor as a slice of a fused parameter, divided further over tensor-parallel ranks. Each
rank hashes its part at the position that it has in the whole tensor. The sums are compared with the hash of the sent
tensor, without any knowledge of how the other side divides it. A `Slice` is the location of a tensor in a parameter, a
`Share` the part of a tensor on one worker; `engine_weights` and `engine_experts` make them.

With b_ij the mixed bits of element (i, j) of a tensor as a matrix (first dimension by the rest), the fingerprint is

    sum_i r_i * sum_j s_j * b_ij   mod 2^64

where r and s are fixed pseudo-random odd 64-bit numbers (splitmix64 of the index): multilinear hashing (Carter and
Wegman, 1979). It depends on order and position: moved rows, exchanged columns and single flipped bits change it, except
with a probability around 2^-60. It detects faults, not attacks.

Values that matrix kernels do not distinguish have the same bits: zeros of either sign, and float32 and bfloat16 values
below the smallest normal number, which some CPU kernels flush.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from telescope.weights.plan import add_fingerprints, as_matrix_shape, to_hex

CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements hashed at a time, by device: 512 KiB of int64 fit a core's cache, 128 MiB outweigh a kernel launch."""

_MASK = (1 << 64) - 1
_ROW_SEED = 0x243F6A8885A308D3
_COLUMN_SEED = 0x13198A2E03707344

# dtype -> (integer view, mask of the magnitude: an element that is zero under it counts as 0)
_VIEWS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float8_e4m3fn: (torch.int8, 0x7F),
}


@torch.no_grad()
def fingerprint(part: torch.Tensor, row_offset: int = 0, column_offset: int = 0) -> int:
    """Computes the fingerprint of a tensor in [0, 2^64), or the share of its part at (row_offset, column_offset).

    The shares of disjoint parts that cover a tensor add up to the tensor's fingerprint, modulo 2^64. Raises `TypeError`
    for an unknown dtype.
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


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Returns the mixed bits of the elements as int64. Zeros of either sign and subnormals are 0.

    Mixing spreads bits over the word: typical weights end in zero bits (bfloat16 values in float32, round numbers), and
    without mixing so would all products.
    """
    view, magnitude = _VIEWS[values.dtype]
    bits = values.contiguous().view(view)
    bits = torch.where((bits & magnitude) == 0, 0, bits).to(torch.int64)
    bits *= _signed(0x9E3779B97F4A7C15)
    bits ^= _shift_right(bits, 32)
    return bits


def _weights(count: int, offset: int, seed: int, device: torch.device) -> torch.Tensor:
    """Returns the odd splitmix64 numbers of the indices offset .. offset + count, int64 [count]."""
    x = torch.arange(offset, offset + count, dtype=torch.int64, device=device)
    x = x * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift_right(x, 31)) | 1


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts int64 logically, while torch's own shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Returns the int64 that has the bits of an unsigned 64-bit number."""
    return value - (1 << 64) if value >= 1 << 63 else value


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a trainer tensor in one parameter of one worker.

    `rows` and `columns` are the range of the part in the trainer's tensor (first dimension by the rest). `fingerprint`
    is its share of the tensor's fingerprint, in hex. `exact` is False if the values do not convert to the transfer's
    dtype without loss, so that they cannot have been sent.
    """

    place: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    fingerprint: str
    exact: bool = True
    problem: str = ""
    """Why the part fails the comparison, whatever its fingerprint. Empty if nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The location of a trainer tensor in a parameter, and its range in the tensor."""

    first_row: int
    rows: tuple[int, int]
    columns: tuple[int, int]


Slices = list[tuple[str, Slice]]
"""Tensors in a parameter, in the order of its rows. A tensor that the parameter divides comes several times."""


def fingerprint_slices(
    blocks: Iterable[tuple[int, torch.Tensor]], place: str, slices: Slices, dtype: torch.dtype
) -> Iterator[tuple[str, Share]]:
    """Computes the shares of all tensors in a parameter, given as (first column, block of columns)."""
    sums: list[list[int]] = [[] for _ in slices]
    exact = [True] * len(slices)
    for first_column, block in blocks:
        for index, (_, where) in enumerate(slices):
            part = block[where.first_row : where.first_row + where.rows[1] - where.rows[0]]
            cast = part.to(dtype)
            exact[index] &= part.dtype == dtype or bool((cast.to(part.dtype) == part).all())
            sums[index].append(fingerprint(cast, where.rows[0], where.columns[0] + first_column))
    for (name, where), parts, is_exact in zip(slices, sums, exact, strict=True):
        yield name, Share(place, where.rows, where.columns, to_hex(add_fingerprints(parts)), is_exact)
