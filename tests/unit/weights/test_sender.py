"""The fault that the sender can make on purpose: as small as can be, and always visible."""

from __future__ import annotations

import pytest
import torch

from telescope.weights.fingerprint import fingerprint
from telescope.weights.sender import flip_one_bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 4), (7,), (2, 3, 5)])
def test_one_element_changes_by_one_step_and_the_fingerprint_with_it(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor.view(-1)[:2] = 0.0  # a bit of these would not count
    original = tensor.clone()
    corrupted = flip_one_bit(tensor)
    assert torch.equal(tensor, original), "the trainer's own tensor stays as it is"
    assert int((corrupted != tensor).sum()) == 1
    assert (corrupted - tensor).abs().max() <= 2.0 * torch.finfo(dtype).eps * tensor.abs().max()
    assert fingerprint(corrupted) != fingerprint(tensor)
