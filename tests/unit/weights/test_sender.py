"""Fingerprints without engines, and the smallest fault that the sender can inject."""

import pytest
import torch

from telescope.weights.fingerprint import fingerprint
from telescope.weights.plan import TensorMeta, make_update, to_hex
from telescope.weights.sender import WeightSender, flip_one_bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 4), (7,), (2, 3, 5)])
def test_one_element_changes_by_one_step_and_the_fingerprint_with_it(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor.view(-1)[:2] = 0.0  # a bit of these would not count
    original = tensor.clone()
    corrupted = flip_one_bit(tensor)
    assert torch.equal(tensor, original), "the trainer's own tensor stays as it is"
    assert int((corrupted != tensor).sum()) == 1
    assert (corrupted - tensor).abs().max() <= 2.0 * torch.finfo(dtype).eps * tensor.abs().max()
    assert fingerprint(corrupted) != fingerprint(tensor)


@pytest.mark.parametrize(("rank", "takes_them"), [(0, True), (1, False)])
def test_without_engines_the_first_rank_takes_the_fingerprints_of_the_cast_tensors(rank, takes_them):
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    metas = [TensorMeta(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    update = make_update(metas, version=0, dtype="bfloat16", mode="flattened_bucket", bucket_mb=1, timeout_seconds=10.0)
    report = WeightSender(rank=rank).send(iter(tensors.items()), update, [], fingerprints=True)
    expected = {name: to_hex(fingerprint(tensor.bfloat16())) for name, tensor in tensors.items()}
    assert report.fingerprints == (expected if takes_them else {})
