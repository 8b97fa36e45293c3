"""Whole tensors out of shards on three real ranks: bit for bit what torch gathers one by one, in fewer collectives."""

import warnings
from typing import Any

import pytest
import torch
from tests.integration.trainer.trainer_cases import make_config, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from telescope.trainer.backends.fsdp import sharding as module
from telescope.trainer.backends.fsdp.sharding import gather_full_tensors

RANKS = 3
SHAPES = [(7, 5), (3,), (1, 4), (2, 3, 2), (6, 2), (16,), (0, 3), (9, 1)]
"""Rows that three ranks share evenly, unevenly, with none for the last, with none for two of them, with none at all."""
GROUPS = {"each for itself": 1, "some together": 64, "all together": 2**20}


def tensors() -> list[tuple[str, torch.Tensor]]:
    """Sharded tensors of all shapes, and between them a replicated one and one that is no DTensor."""
    mesh = init_device_mesh("cpu", (RANKS,))
    made: list[tuple[str, torch.Tensor]] = []
    for index, shape in enumerate(SHAPES):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(index))
        made.append((f"sharded {shape}", distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)))
    made.insert(3, ("replicated", distribute_tensor(torch.arange(5.0), mesh, [Replicate()], src_data_rank=None)))
    made.insert(6, ("plain", torch.arange(4.0)))
    made.append(("by columns", distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)], src_data_rank=None)))
    return made


def gathered(trainer: Any, dtype: torch.dtype | None) -> dict[str, Any]:
    """What one rank gets, and the bytes of each collective."""
    sharded = tensors()
    by_torch = {
        name: (cast.full_tensor() if isinstance(cast, DTensor) else cast).clone()
        for name, tensor in sharded
        for cast in [tensor if dtype is None else tensor.to(dtype)]
    }
    found: dict[str, Any] = {"by torch": by_torch}
    warnings.simplefilter("error", FutureWarning)  # in this process of one rank, which ends with this
    all_gather = module.all_gather
    for label, group_bytes in GROUPS.items():
        received: list[int] = []

        def counting(into: torch.Tensor, part: torch.Tensor, group: Any, received: list[int] = received) -> None:
            received.append(into.nbytes)
            all_gather(into, part, group)

        module.all_gather = counting
        try:
            ours = {name: t.clone() for name, t in gather_full_tensors(sharded, dtype, group_bytes=group_bytes)}
        finally:
            module.all_gather = all_gather
        found[label] = {"tensors": ours, "received": received}
    return found


@pytest.fixture(scope="module")
def by_dtype(models: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[dict[str, Any]]]:
    """Of every rank, as they are and cast."""
    config = make_config(models["tied"])
    dtypes = [None, torch.bfloat16]
    folder = tmp_path_factory.mktemp("whole")
    results = run_ranks([(gathered, config, (dtype,)) for dtype in dtypes], num_ranks=RANKS, folder=folder)
    return dict(zip(dtypes, results, strict=True))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_every_rank_gets_every_tensor_bit_for_bit_in_order(by_dtype, dtype, group):
    for found in by_dtype[dtype]:
        expected, ours = found["by torch"], found[group]["tensors"]
        assert list(ours) == list(expected)
        for name, tensor in expected.items():
            assert ours[name].dtype == tensor.dtype
            assert ours[name].shape == tensor.shape, name
            assert torch.equal(ours[name], tensor), name


def test_tensors_travel_together_and_as_what_they_were_cast_to(by_dtype):
    plain, half = by_dtype[None][0], by_dtype[torch.bfloat16][0]
    counts = [len(plain[group]["received"]) for group in GROUPS]
    assert counts[0] > counts[1] > counts[2] == 3, "one between each two that cannot travel with others"
    assert sum(half["all together"]["received"]) * 2 == sum(plain["all together"]["received"])
