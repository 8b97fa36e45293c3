"""Claims about fingerprints: they add up over any cut, and every kind of fault changes them."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.weights.fingerprint import CHUNK_ELEMENTS, fingerprint
from telescope.weights.plan import add_fingerprints, to_hex

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sample(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.data(), st.sampled_from(DTYPES))
def test_shares_of_any_cut_add_up_to_the_whole(rows, columns, data, dtype):
    tensor = sample(rows, columns, dtype)
    row_cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))})
    column_cuts = sorted({0, columns, *data.draw(st.lists(st.integers(0, columns), max_size=3))})
    shares = [
        fingerprint(tensor[r0:r1, c0:c1], r0, c0) for r0, r1 in pairwise(row_cuts) for c0, c1 in pairwise(column_cuts)
    ]
    assert add_fingerprints(shares) == fingerprint(tensor)


def test_chunks_memory_layout_and_number_of_dimensions_do_not_show(monkeypatch):
    tensor = sample(8, 6)
    whole = fingerprint(tensor)
    assert fingerprint(tensor.T.contiguous().T) == fingerprint(tensor.view(8, 2, 3)) == whole
    assert fingerprint(torch.tensor(2.0)) == fingerprint(torch.tensor([2.0]))
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 20)
    assert fingerprint(tensor) == whole


@settings(deadline=None)
@given(st.integers(0, 199), st.integers(0, 15), st.sampled_from(DTYPES))
def test_one_flipped_bit_changes_it(index, bit, dtype):
    tensor = sample(20, 10, dtype)
    flipped = tensor.clone()
    view = flipped.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)
    view[index] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert fingerprint(flipped) != fingerprint(tensor)


def test_exchanged_rows_columns_and_elements_change_it():
    tensor = sample(6, 6)
    rows, columns, elements = tensor.clone(), tensor.clone(), tensor.clone()
    rows[[1, 4]] = tensor[[4, 1]]
    columns[:, [0, 5]] = tensor[:, [5, 0]]
    elements[2, 3], elements[3, 2] = tensor[3, 2], tensor[2, 3]
    values = [fingerprint(t) for t in (tensor, rows, columns, elements, tensor.T)]
    assert len(set(values)) == 5


def test_the_sign_of_zero_and_values_that_kernels_flush_do_not_count():
    for dtype in DTYPES:
        assert fingerprint(torch.tensor([0.0, 1.0]).to(dtype)) == fingerprint(torch.tensor([-0.0, 1.0]).to(dtype))
    assert fingerprint(torch.tensor([1e-40])) == fingerprint(torch.tensor([1e-40], dtype=torch.bfloat16)) == 0
    assert fingerprint(torch.tensor([1e-6], dtype=torch.float16)) != 0


def test_it_does_not_change_from_one_release_to_the_next():
    """Sender and engine may run different torch versions; the constants are part of the format."""
    assert to_hex(fingerprint(torch.arange(1, 7, dtype=torch.float32).view(2, 3))) == "64c2ce9d9073d729"


def test_a_dtype_of_no_transfer_is_refused():
    with pytest.raises(TypeError, match="int64"):
        fingerprint(torch.zeros(2, dtype=torch.int64))
