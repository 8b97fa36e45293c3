"""Shards a model, gathers full tensors, and controls when FSDP2 gathers weights.

The weights of a unit are gathered together. The units are the untied embedding, the untied head, every layer, and the
root (the last norm, and the shared table if tied). A forward pass ends with the root and the head, and the backward
pass begins with them, so they are not freed in between. The embedding's backward pass does not read its weights.

Invariants of loading: only rank 0 has the whole model, on its CPU; every other rank has its shards and one full tensor
at a time. The gradient of a parameter is the sum of the ranks' gradients: FSDP's average is off, since the loss is
divided by a count over all ranks. After the last backward pass of an optimizer step everything is sharded again, so
that the next forward pass gathers the updated weights.

Invariants of gathering: every rank yields the same tensors in the same order, bit for bit equal to `full_tensor` of the
cast shards. All ranks must drain the iterator, since it is collective. In addition to the yielded tensors, at most one
group is in memory, twice (as received and as separate tensors). `DTensor.full_tensor` gathers one tensor at a time and
spends up to a millisecond in Python for each, which for the 434 tensors of a 3B model takes longer than the transfer.
Here shards are cast, concatenated, gathered at once, and separated.
"""

import itertools
import math
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from telescope.config.memory import num_recomputed, recomputes_attention, reshards_after_forward
from telescope.config.model_shape import ModelShape
from telescope.errors import UserError
from telescope.trainer.attention import Kernel, choose_kernel
from telescope.trainer.blocks import wrap_blocks
from telescope.trainer.capability import choose_execution
from telescope.trainer.lora import adapted_layers, add_adapters, is_adapter, merged
from telescope.trainer.model import PREFIX, PolicyModel, compute_dtype, is_tied, load_causal_lm
from telescope.utils.data import split_by_size
from telescope.utils.text import listed
from telescope.utils.timeline import Timeline

LOW_PRECISION = (torch.bfloat16, torch.float16)


def build_sharded_policy(config: Any, mesh: DeviceMesh, device: torch.device) -> PolicyModel:
    """Builds the sharded policy with its weights. Collective. Raises `UserError` for an unusable model."""
    dtype: torch.dtype = getattr(torch, config.model_dtype)
    execution = choose_execution(config.model, config.max_model_len, trust_remote_code=config.trust_remote_code)
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code, "attention": execution.attention}
    source = load_causal_lm(config.model, dtype, with_weights=True, **options) if dist.get_rank() == 0 else None
    causal_lm = load_causal_lm(config.model, dtype, with_weights=False, **options)
    if config.lora_rank:
        for model in (causal_lm, source):
            if model is not None:
                add_adapters(model, config)
    policy = PolicyModel(causal_lm, config.entropy_chunk_size, packs=execution.packs)
    gpu_memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    model_shape = ModelShape.from_config(policy.causal_lm.config.to_dict())
    wrap_blocks(
        policy,
        num_recomputed=num_recomputed(config, len(policy.layers)),
        recompute_attention=recomputes_attention(config.recompute_attention, config, model_shape, gpu_memory),
        compiled=compiles_blocks(config, policy, device),
        has_dropout=bool(config.lora_rank and config.lora_dropout),
    )
    shares_table = is_tied(policy.causal_lm)
    reshard = reshards_after_forward(config.fsdp_reshard_after_forward, device.type)
    shard(policy, mesh, compute_dtype(config), reshard=reshard)
    set_prefetch(policy, config.fsdp_prefetch_layers)
    policy.to_empty(device=device)
    if shares_table:
        # Moving from the meta device duplicated the parameter that embedding and head share.
        embedding = policy.causal_lm.get_input_embeddings().weight
        assert isinstance(embedding, nn.Parameter)
        policy.head.weight = embedding
    fill(policy, source, mesh, device)
    refuse_non_finite(policy, config)
    return policy


def compiles_blocks(config: Any, policy: PolicyModel, device: torch.device) -> bool:
    """Returns whether the blocks are compiled, equally on all ranks."""
    dtype = compute_dtype(config)
    # The padded kernel makes one call per length in a row, so each row would be compiled again.
    by_offsets = kernel_of(policy, dtype, device) not in (None, "padded")
    # In other dtypes the backward pass of the grouped product of experts is Python, and compiling fails for each block.
    is_compilable = dtype == torch.bfloat16 or not any(
        name.endswith("experts.gate_up_proj") for name, _ in policy.named_parameters()
    )
    # Routes are set outside of a block, and agreement is counted inside.
    return config.compile_blocks and not config.router_replay and by_offsets and is_compilable


def kernel_of(policy: PolicyModel, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """Returns the kernel for packed samples, or None if the model does not pack them."""
    if not policy.packs:
        return None
    return choose_kernel(device, dtype, policy.head_dim, plain=policy.has_plain_attention)


def shard(policy: PolicyModel, mesh: DeviceMesh, dtype: torch.dtype, *, reshard: bool) -> None:
    """Wraps each layer, the untied embedding, the untied head, and the rest as units, which compute in `dtype`.

    `reshard` frees a layer's gathered weights between its forward and backward pass.
    """
    casts = dtype in LOW_PRECISION or any(parameter.dtype != dtype for parameter in policy.parameters())
    precision = MixedPrecisionPolicy(
        param_dtype=dtype if casts else None, reduce_dtype=torch.float32 if dtype in LOW_PRECISION else None
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision}
    for layer in policy.layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    if not is_tied(policy.causal_lm):
        fully_shard(policy.causal_lm.get_input_embeddings(), reshard_after_forward=reshard, **options)
        fully_shard(policy.head, reshard_after_forward=False, **options)
    fully_shard(policy, reshard_after_forward=False, **options)
    for unit in units(policy):
        # Sums with ReduceOp.SUM, because gloo lacks the premultiplied reductions that other factors need.
        if mesh.size() > 1:  # a single rank would divide by 1, with a copy
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def fill(policy: PolicyModel, source: nn.Module | None, mesh: DeviceMesh, device: torch.device) -> None:
    """Sends all ranks their shards of rank 0's `source` model. Collective. `source` is None on other ranks."""
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


@torch.no_grad()
def refuse_non_finite(policy: PolicyModel, config: Any) -> None:
    """Raises `UserError` for NaN or infinite weights in this rank's shards."""
    shards = {name: local_tensor(parameter) for name, parameter in policy.named_parameters()}
    shards = {name: shard for name, shard in shards.items() if shard.numel()}
    largest = torch._foreach_norm(list(shards.values()), math.inf)
    is_finite = torch.stack(largest).isfinite().tolist()
    if not all(is_finite):
        names = [name.removeprefix(PREFIX) for name, finite in zip(shards, is_finite, strict=True) if not finite]
        raise UserError(
            f"model: {config.model!r} has weights that are NaN or infinite in model_dtype {config.model_dtype}: "
            f"{listed(names)}. Download or save the model again, or choose a model_dtype with a wider range"
        )


def merged_tensors(
    named: Iterable[tuple[str, torch.Tensor]], policy: PolicyModel, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields `named` with adapters added to their layers' weights. Collective.

    Every rank merges its own rows, one tensor at a time. It needs all of A, and its rows of B.
    """
    layers = {name.removeprefix(PREFIX): layer for name, layer in adapted_layers(policy).items()}
    gathered_A = dict(gather_full_tensors(((name, layer.lora_A.weight) for name, layer in layers.items()), None))
    for name, tensor in named:
        layer = layers.get(name.removesuffix(".weight"))
        if is_adapter(name):
            continue
        if layer is None or not name.endswith(".weight"):
            yield name, tensor
            continue
        a_RI = gathered_A[name.removesuffix(".weight")]
        local = merged(local_tensor(tensor), a_RI, local_tensor(layer.lora_B.weight), layer.scaling, dtype)
        if isinstance(tensor, DTensor):
            options: dict[str, Any] = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
            local = DTensor.from_local(local, tensor.device_mesh, tensor.placements, **options)
        yield name, local


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers a sharded tensor on every rank. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


GROUP_BYTES = 256 * 2**20
"""Bytes of full tensors per collective. A larger tensor has its own collective and is not copied."""


def gather_full_tensors(
    named: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None,
    *,
    exact: Container[str] = (),
    group_bytes: int = GROUP_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor) of `named` in order, cast to `dtype` if given, except those in `exact`. Collective."""

    def wanted(item: tuple[str, torch.Tensor]) -> torch.dtype:
        return item[1].dtype if dtype is None or item[0] in exact else dtype

    def kind(item: tuple[str, torch.Tensor]) -> tuple[bool, torch.dtype]:
        # divided by rows, as FSDP2 does it
        return isinstance(item[1], DTensor) and tuple(item[1].placements) == (Shard(0),), wanted(item)

    # To cast and gather the DTensor of a single rank takes 16 times as long, 0.06 ms.
    items = (
        (name, tensor.to_local() if isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1 else tensor)
        for name, tensor in named
    )
    for (by_rows, to), same in itertools.groupby(items, kind):
        if not by_rows:
            yield from ((name, full_tensor(tensor.to(to))) for name, tensor in same)
            continue
        for group in split_by_size(same, lambda item: item[1].numel() * wanted(item).itemsize, group_bytes):
            yield from _gather(group, to)


def _gather(group: list[tuple[str, Any]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the full tensors of a group. Rank r of W has at most ceil(rows / W) rows, from r * ceil(rows / W) on."""
    first = group[0][1]
    mesh = first.device_mesh
    num_ranks = mesh.size()
    per_row = [tensor[1].numel() // max(tensor[1].shape[0], 1) for tensor in group]
    chunks = [-(-tensor.shape[0] // num_ranks) * row for (_, tensor), row in zip(group, per_row, strict=True)]
    sent = torch.empty(sum(chunks), dtype=dtype, device=first.device)
    for (_, tensor), place in zip(group, sent.split(chunks), strict=True):
        local = local_tensor(tensor.detach())
        place[: local.numel()].copy_(local.reshape(-1))
    received = torch.empty(num_ranks * len(sent), dtype=sent.dtype, device=sent.device)
    all_gather(received, sent, mesh.get_group())
    if len(group) == 1:  # the parts are contiguous, with padding only at the end
        name, tensor = group[0]
        yield name, received[: tensor.numel()].view(tensor.shape)
        return
    by_rank = [part.split(chunks) for part in received.split(len(sent))]
    for index, (name, tensor) in enumerate(group):
        yield name, torch.cat([parts[index] for parts in by_rank])[: tensor.numel()].view(tensor.shape)


def all_gather(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gathers bytes, which every backend supports, with this torch version's function: 2.13 warns about 2.11's."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(received.view(-1).view(torch.uint8), sent.view(torch.uint8), group=group)


def units(policy: nn.Module) -> list[FSDPModule]:
    """Returns the units, including the root."""
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def set_prefetch(policy: PolicyModel, num_layers: int) -> None:
    """Gathers `num_layers` units ahead of the computing unit. 0 keeps torch's default, one in backward passes."""
    embedding = policy.causal_lm.get_input_embeddings()
    forward = [unit for unit in (embedding, *policy.layers, policy.head) if isinstance(unit, FSDPModule)]
    backward = [unit for unit in reversed(forward) if unit is not embedding]
    if isinstance(embedding, FSDPModule):
        embedding.set_unshard_in_backward(False)
    if not num_layers:
        return
    assert isinstance(policy, FSDPModule)
    policy.set_modules_to_forward_prefetch([*forward[:num_layers]])
    for place, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch([*forward[place + 1 : place + 1 + num_layers]])
    for place, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch([*backward[place + 1 : place + 1 + num_layers]])


class TimedReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, called unchanged and measured while a timeline is set.

    FSDP2 calls it on its communication stream, so that on a GPU the span shows the time of the reduction there, in
    parallel with the backward pass. A single rank has no reductions and no spans.
    """

    def __init__(self) -> None:
        super().__init__()
        self._timeline: Timeline | None = None
        self._micro_batch: int | None = None

    @contextmanager
    def during(self, timeline: Timeline, micro_batch: int) -> Iterator[None]:
        """Records the reductions of a backward pass on `timeline`."""
        self._timeline, self._micro_batch = timeline, micro_batch
        try:
            yield
        finally:
            self._timeline = self._micro_batch = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._timeline is None:
            return super().__call__(*args, **kwargs)
        with self._timeline.span("gradient_reduction", self._micro_batch):
            return super().__call__(*args, **kwargs)
