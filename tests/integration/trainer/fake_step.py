"""A training step of a large model on tensors that have sizes and no data, with every byte counted.

One rank of any number, whose collectives do nothing. What a GPU does otherwise than the CPU is put in place of it:
torch's own attention kernel, products that sum up in float32 without copies, logits cut into blocks of the vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.integration.trainer.live_bytes import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3Config

from telescope.config import TelescopeConfig
from telescope.config.memory import VOCABULARY_BLOCKS, num_recomputed, recomputes_attention, trainer_memory
from telescope.config.model_shape import ModelShape
from telescope.trainer import logprob
from telescope.trainer.backends.fsdp import backend as fsdp_backend
from telescope.trainer.backends.fsdp import sharding
from telescope.trainer.backends.fsdp.sharding import set_prefetch
from telescope.trainer.batch import TrainSample
from telescope.trainer.blocks import wrap_blocks
from telescope.trainer.lora import add_adapters
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.model import PolicyModel, is_tied, load_causal_lm
from telescope.trainer.packing import pack_step
from telescope.utils.timeline import Timeline


def bytes_of_a_step(folder: Path, shape: dict[str, Any], *, micro_batches: int = 2, **settings: Any) -> tuple[int, int]:
    """Returns (peak of a rank's second step, estimate without the libraries' share)."""
    Qwen3Config(**shape, max_position_embeddings=131_072, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    config = TelescopeConfig(
        model=str(folder), environments=[{"name": "countdown"}], device="cpu", max_model_len=settings["seq_len"],
        max_tokens=settings["seq_len"] // 2, **{"fsdp_reshard_after_forward": True, "compile_blocks": False} | settings,
    )  # fmt: skip
    model_shape = ModelShape.from_config(json.loads((folder / "config.json").read_text()))
    assert model_shape is not None
    estimate = trainer_memory(
        config, model_shape, "cuda",
        recompute_attention=recomputes_attention(config.recompute_attention, config, model_shape, None),
    )  # fmt: skip
    return peak(config, shape["vocab_size"], micro_batches), estimate.total - estimate.overhead


def peak(config: TelescopeConfig, vocab_size: int, micro_batches: int) -> int:
    """Bytes at the peak of the second step, when the optimizer has its state."""
    ranks = config.trainer_num_workers
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with pytest.MonkeyPatch.context() as patch:
            as_on_a_gpu(patch, init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",)))
            with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
                backend = fsdp_backend.FSDPBackend(config, 0, ranks, torch.device("cpu"))
                backend.init()
                for _ in range(2):
                    live.mark()
                    step(backend, vocab_size, micro_batches)
                return live.peak
    finally:
        dist.destroy_process_group()


def step(backend: Any, vocab_size: int, micro_batches: int) -> None:
    tokens = backend.config.seq_len
    trained_T = np.arange(tokens) > 0
    samples = [
        TrainSample(
            f"s{i}", 0, "countdown", np.zeros(tokens, dtype=int), trained_T, -1.0 * trained_T, trained_T - 1, 0.0, 1.0
        )
        for i in range(micro_batches * backend.layout.data_size)
    ]
    mine = pack_step(samples, step=0, version=0, seq_len=tokens, num_ranks=backend.layout.data_size)[0].minibatches[0]
    assert len(mine.micro_batches) == micro_batches
    timeline = Timeline(backend.device, 0, enabled=False)
    backend.accumulate(mine, 0, timeline, StepMetrics(backend.device))
    backend.optimizer_step(1e-6, 1.0, timeline)


def as_on_a_gpu(patch: pytest.MonkeyPatch, mesh: Any) -> None:
    def build(config: Any, mesh: Any, device: torch.device) -> PolicyModel:
        # As `build_sharded_policy`, without weights to read and send.
        causal_lm = load_causal_lm(config.model, getattr(torch, config.model_dtype), with_weights=False)
        if config.lora_rank:
            add_adapters(causal_lm, config)
        policy = PolicyModel(causal_lm, config.entropy_chunk_size)
        count, attention = (
            num_recomputed(config, len(policy.layers)),
            recomputes_attention(config.recompute_attention, config, None, None),
        )
        wrap_blocks(policy, num_recomputed=count, recompute_attention=attention, compiled=False)
        shares_table = is_tied(policy.causal_lm)
        sharding.shard(policy, mesh, sharding.compute_dtype(config), reshard=config.fsdp_reshard_after_forward)
        set_prefetch(policy, config.fsdp_prefetch_layers)
        policy.to_empty(device=device)
        if shares_table:
            policy.head.weight = policy.causal_lm.get_input_embeddings().weight
        return policy

    patch.setattr(sharding, "choose_kernel", lambda *_, **__: "varlen")
    patch.setattr(fsdp_backend.sharding, "build_sharded_policy", build)
    patch.setattr(fsdp_backend, "init_device_mesh", lambda *_, **__: mesh)
    patch.setattr(
        fsdp_backend.FSDPBackend, "gradient_norm", lambda _, gradients: float(len(torch._foreach_norm(gradients)))
    )
    patch.setitem(logprob.VOCABULARY_BLOCKS, "cpu", VOCABULARY_BLOCKS)
    patch.setattr(
        logprob, "_matmul", lambda left, right, dtype: torch.empty(left.shape[0], right.shape[1], dtype=dtype)
    )
    patch.setattr(logprob, "_add_product", lambda *_: None)
    patch.setattr(logprob, "_block_gradient", lambda logits, *rest: torch.empty_like(logits, dtype=rest[-1]))
