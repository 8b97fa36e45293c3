"""Whole tensors out of shards, many in one collective.

`DTensor.full_tensor` gathers one tensor at a time, through layers of Python that take up to a millisecond each: with
the 434 tensors of a 3B model more than the bytes take. Here shards are cast and laid end to end, gathered at once, and
cut apart.

Invariants: every rank yields the same tensors in the same order, bit for bit those of `full_tensor` of the cast shards;
all ranks must drain the iterator, since it is collective; beside what it has yielded no more than one group is alive,
twice (what was received, and what was cut out of it).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from telescope.trainer.backends.fsdp.sharding import full_tensor, local_tensor

GROUP_BYTES = 256 * 2**20
"""Of whole tensors in one collective. A larger tensor has one of its own, and is not copied out of it."""


def whole_tensors(
    named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, *, group_bytes: int = GROUP_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of each of `named`, in its order, cast to `dtype` if it is given. Collective."""
    group: list[tuple[str, DTensor]] = []
    size = 0
    for name, tensor in named:
        rows = cut_by_rows(tensor)
        wanted = tensor.dtype if dtype is None else dtype
        num_bytes = tensor.numel() * wanted.itemsize
        fits = size + num_bytes <= group_bytes and (dtype is not None or not group or group[0][1].dtype == wanted)
        if group and (rows is None or not fits):
            yield from _gather(group, dtype)
            group, size = [], 0
        if rows is None:
            yield name, full_tensor(tensor.to(wanted))
        else:
            group.append((name, rows))
            size += num_bytes
    if group:
        yield from _gather(group, dtype)


def cut_by_rows(tensor: torch.Tensor) -> DTensor | None:
    """The tensor, if each rank has some of its rows, as FSDP2 cuts parameters."""
    if not isinstance(tensor, DTensor) or tuple(tensor.placements) != (Shard(0),):
        return None
    return tensor if tensor.device_mesh.size() > 1 else None


def _gather(group: list[tuple[str, DTensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors of a group. Rank r of W has rows r * ceil(rows / W) and on, and maybe fewer or none."""
    first = group[0][1]
    mesh = first.device_mesh
    num_ranks = mesh.size()
    per_row = [tensor[1].numel() // max(tensor[1].shape[0], 1) for tensor in group]
    chunks = [-(-tensor.shape[0] // num_ranks) * row for (_, tensor), row in zip(group, per_row, strict=True)]
    sent = torch.empty(sum(chunks), dtype=dtype or first.dtype, device=first.device)
    for (_, tensor), place in zip(group, sent.split(chunks), strict=True):
        local = local_tensor(tensor.detach())
        place[: local.numel()].copy_(local.reshape(-1))
    received = torch.empty(num_ranks * len(sent), dtype=sent.dtype, device=sent.device)
    # Bytes: a collective moves them whatever they mean.
    all_gather(received.view(torch.uint8), sent.view(torch.uint8), mesh.get_group())
    if len(group) == 1:  # the parts lie end to end, and only the end is padding
        name, tensor = group[0]
        yield name, received[: tensor.numel()].view(tensor.shape)
        return
    by_rank = [part.split(chunks) for part in received.split(len(sent))]
    for index, (name, tensor) in enumerate(group):
        yield name, torch.cat([parts[index] for parts in by_rank])[: tensor.numel()].view(tensor.shape)


def all_gather(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """One collective, by the name that it has: torch 2.13 warns of the only one that 2.11 knows."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(received, sent, group=group)
