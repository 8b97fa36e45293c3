"""Loading a model into shards, and full tensors out of them again.

Owns which modules are gathered together and how the weights reach the ranks; not when they are gathered (`gathering`).
Invariants: only rank 0 ever holds the
whole model, on its CPU, while loading; every other rank holds its shards and one full tensor at a time. The gradient
of a parameter is the plain sum of the ranks' gradients: FSDP's average over ranks is switched off, since the loss is
divided by a count of all ranks already.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from telescope.config.trainer_memory import num_recomputed, reshards_after_forward
from telescope.trainer.attention import choose_kernel
from telescope.trainer.backends.fsdp.gathering import set_prefetch, units
from telescope.trainer.blocks import wrap_blocks
from telescope.trainer.experts import can_be_compiled
from telescope.trainer.model import DTYPES, PREFIX, PolicyModel, load_causal_lm

LOW_PRECISION = (torch.bfloat16, torch.float16)


def compute_dtype(config: Any) -> torch.dtype:
    """The dtype of activations and of gathered weights."""
    return DTYPES[config.mixed_precision_dtype or config.model_dtype]


def build_sharded_policy(config: Any, mesh: DeviceMesh, device: torch.device) -> PolicyModel:
    """The policy on all ranks, sharded, with its weights. Collective. Raises `UserError` if the model cannot be had."""
    dtype = DTYPES[config.model_dtype]
    options = {"trust_remote_code": config.trust_remote_code}
    source = load_causal_lm(config.model, dtype, with_weights=True, **options) if dist.get_rank() == 0 else None
    policy = PolicyModel(load_causal_lm(config.model, dtype, with_weights=False, **options), config.entropy_chunk_size)
    wrap_blocks(
        policy,
        num_recomputed=num_recomputed(config, len(policy.layers)),
        recompute_attention=config.recompute_attention,
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
        # Moving off the meta device made two parameters of the one that embedding and head share.
        embedding = policy.causal_lm.get_input_embeddings().weight
        assert isinstance(embedding, nn.Parameter)
        policy.head.weight = embedding
    fill(policy, source, mesh, device)
    return policy


def compiles_blocks(config: Any, policy: PolicyModel, device: torch.device) -> bool:
    """Whether the blocks are compiled: the same on all ranks."""
    dtype = compute_dtype(config)
    # The calls of the padded kernel are as many as a row has lengths: each row would be compiled anew.
    by_offsets = choose_kernel(device, dtype, policy.head_dim) != "padded"
    return config.compile_blocks and by_offsets and can_be_compiled(policy, dtype)


def shard(policy: PolicyModel, mesh: DeviceMesh, dtype: torch.dtype, *, reshard: bool) -> None:
    """Wrap each layer, then the embedding and the head by themselves if they are untied, then the rest.

    `reshard`: drop a layer's gathered weights between its forward and its backward pass.
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
        # A sum, and by ReduceOp.SUM: the premultiplied reductions that other factors use do not exist in gloo.
        if mesh.size() > 1:  # one rank would divide by 1, through a copy
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def fill(policy: PolicyModel, source: nn.Module | None, mesh: DeviceMesh, device: torch.device) -> None:
    """Give every rank its shards of rank 0's `source` model (None on the other ranks). Collective."""
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
    """The whole of a sharded tensor on every rank. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
