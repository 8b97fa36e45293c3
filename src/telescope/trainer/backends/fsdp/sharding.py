"""Loads a model into shards, and gathers full tensors from shards.

Owns which modules are gathered together and how the weights reach the ranks; `communication` owns when they are
gathered.

Invariants of loading: only rank 0 has the whole model, on its CPU; every other rank has its shards and one full tensor
at a time. The gradient of a parameter is the sum of the ranks' gradients: FSDP's average is off, since the loss is
divided by a count over all ranks.

Invariants of gathering: every rank yields the same tensors in the same order, bit for bit those of `full_tensor` of the
cast shards. All ranks must drain the iterator, since it is collective. Besides the yielded tensors at most one group is
in memory, twice (as received and as separate tensors). `DTensor.full_tensor` gathers one tensor at a time, through up
to a millisecond of Python each, which takes longer than the transfer for the 434 tensors of a 3B model. Here shards are
cast, concatenated, gathered at once, and separated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from telescope.config.memory import num_recomputed, recomputes_attention, reshards_after_forward
from telescope.config.model_shape import ModelShape
from telescope.trainer.attention import choose_kernel
from telescope.trainer.backends.fsdp.communication import set_prefetch, units
from telescope.trainer.blocks import wrap_blocks
from telescope.trainer.model import DTYPES, PREFIX, PolicyModel, can_be_compiled, load_causal_lm

LOW_PRECISION = (torch.bfloat16, torch.float16)


def compute_dtype(config: Any) -> torch.dtype:
    """Returns the dtype of activations and of gathered weights."""
    return DTYPES[config.mixed_precision_dtype or config.model_dtype]


def build_sharded_policy(config: Any, mesh: DeviceMesh, device: torch.device) -> PolicyModel:
    """Builds the sharded policy with its weights. Collective. Raises `UserError` for an unusable model."""
    dtype = DTYPES[config.model_dtype]
    options = {"trust_remote_code": config.trust_remote_code}
    source = load_causal_lm(config.model, dtype, with_weights=True, **options) if dist.get_rank() == 0 else None
    policy = PolicyModel(load_causal_lm(config.model, dtype, with_weights=False, **options), config.entropy_chunk_size)
    gpu_memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    model_shape = ModelShape.from_config(policy.causal_lm.config.to_dict())
    wrap_blocks(
        policy,
        num_recomputed=num_recomputed(config, len(policy.layers)),
        recompute_attention=recomputes_attention(config.recompute_attention, config, model_shape, gpu_memory),
        compiled=compiles_blocks(config, policy, device),
    )
    is_tied = policy.is_tied
    shard(
        policy,
        mesh,
        compute_dtype(config),
        reshard=reshards_after_forward(config.fsdp_reshard_after_forward, device.type),
    )
    set_prefetch(policy, config.fsdp_prefetch_layers)
    policy.to_empty(device=device)
    if is_tied:
        # Moving off the meta device duplicated the parameter that embedding and head share.
        embedding = policy.causal_lm.get_input_embeddings().weight
        assert isinstance(embedding, nn.Parameter)
        policy.head.weight = embedding
    fill(policy, source, mesh, device)
    return policy


def compiles_blocks(config: Any, policy: PolicyModel, device: torch.device) -> bool:
    """Returns whether the blocks are compiled, equally on all ranks."""
    dtype = compute_dtype(config)
    # The padded kernel makes one call per length in a row, so that each row would be compiled anew.
    by_offsets = choose_kernel(device, dtype, policy.head_dim) != "padded"
    return config.compile_blocks and by_offsets and can_be_compiled(policy, dtype)


def shard(policy: PolicyModel, mesh: DeviceMesh, dtype: torch.dtype, *, reshard: bool) -> None:
    """Wraps each layer, the untied embedding and head separately, and the rest.

    `reshard`: free a layer's gathered weights between its forward and its backward pass.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=dtype if dtype in LOW_PRECISION else None,
        reduce_dtype=torch.float32 if dtype in LOW_PRECISION else None,
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision}
    for layer in policy.layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    if not policy.is_tied:
        fully_shard(policy.causal_lm.get_input_embeddings(), reshard_after_forward=reshard, **options)
        fully_shard(policy.head, reshard_after_forward=False, **options)
    fully_shard(policy, reshard_after_forward=False, **options)
    for unit in units(policy):
        # A sum by ReduceOp.SUM: gloo does not have the premultiplied reductions of other factors.
        if mesh.size() > 1:  # one rank would divide by 1, with a copy
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def fill(policy: PolicyModel, source: nn.Module | None, mesh: DeviceMesh, device: torch.device) -> None:
    """Sends every rank its shards of rank 0's `source` model (None on other ranks). Collective."""
    given = {} if source is None else dict(source.named_parameters()) | dict(source.named_buffers())
    targets = [*policy.named_parameters(), *policy.named_buffers()]
    for name, target in targets:
        full = torch.empty(target.shape, dtype=target.dtype, device=device)
        if source is not None:
            full.copy_(given[name.removeprefix(PREFIX)])
        dist.broadcast(full, src=0)
        if isinstance(target, DTensor):
            local = distribute_tensor(full, mesh, target.placements, src_data_rank=None).to_local()
            target.to_local().copy_(local)
        else:
            target.copy_(full)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers a sharded tensor on every rank. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


GROUP_BYTES = 256 * 2**20
"""Bytes of full tensors per collective. A larger tensor has a separate collective and is not copied."""


def gather_full_tensors(
    named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, *, group_bytes: int = GROUP_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor) of `named` in order, cast to `dtype` if given. Collective."""
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
    """Returns the tensor if it is divided by rows, as FSDP2 does; None otherwise."""
    if not isinstance(tensor, DTensor) or tuple(tensor.placements) != (Shard(0),):
        return None
    return tensor if tensor.device_mesh.size() > 1 else None


def _gather(group: list[tuple[str, DTensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the full tensors of a group. Rank r of W has ceil(rows / W) rows from r * ceil(rows / W), or fewer."""
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
    # As bytes, which every backend can gather.
    all_gather(received.view(torch.uint8), sent.view(torch.uint8), mesh.get_group())
    if len(group) == 1:  # the parts are contiguous, with padding at the end only
        name, tensor = group[0]
        yield name, received[: tensor.numel()].view(tensor.shape)
        return
    by_rank = [part.split(chunks) for part in received.split(len(sent))]
    for index, (name, tensor) in enumerate(group):
        yield name, torch.cat([parts[index] for parts in by_rank])[: tensor.numel()].view(tensor.shape)


def all_gather(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gathers with the function of this torch version: 2.13 warns about the only one of 2.11."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(received, sent, group=group)
