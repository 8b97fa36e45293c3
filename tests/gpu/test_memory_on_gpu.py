"""What torch's allocator gave out at the peak of a step against the estimate. Run by hand: `pytest tests/gpu`."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.trainer.trainer_cases import build_model, make_config, make_samples
from tests.processes import free_port

from telescope.config.memory import recomputes_attention, trainer_memory
from telescope.config.model_shape import ModelShape
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

TOKENS = 16_384
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32_768, "max_position_embeddings": TOKENS, "initializer_range": 0.02,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of a tied and of an untied model."""
    folders = {tied: tmp_path_factory.mktemp("model") for tied in (True, False)}
    for tied, folder in folders.items():
        build_model(folder, tied=tied, **SHAPE)
    return folders


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"gradient_checkpointing_layers": 3}, {"gradient_checkpointing": False}, {"recompute_attention": True},
        {"fsdp_reshard_after_forward": False}, {"model_dtype": "bfloat16"},
    ],
    ids=str,
)  # fmt: skip
def test_the_peak_of_a_step_is_near_the_estimate(
    models: dict[bool, Path], tied: bool, settings: dict[str, Any]
) -> None:
    folder = models[tied]
    fields: dict[str, Any] = {
        "model_dtype": "float32", "mixed_precision_dtype": "bfloat16", "device": "cuda", "entropy_chunk_size": 1024,
        "gradient_checkpointing": True, "seq_len": TOKENS, "trainer_num_workers": 1,
    }  # fmt: skip
    config = make_config(str(folder), **(fields | settings))
    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text()))
    estimate = trainer_memory(
        config, shape, "cuda", recompute_attention=recomputes_attention(config.recompute_attention, config, shape, None)
    )
    gc.collect()  # blocks refer to themselves: the trainer of the case before lives until then
    others = torch.cuda.memory_allocated()
    trainer = Trainer(config, 0, 1, "127.0.0.1", free_port())
    trainer.setup()
    try:
        assert torch.cuda.memory_allocated() - others == pytest.approx(estimate.parameters, rel=0.02)
        (batch,) = pack_step(make_samples([TOKENS // 4] * 8), step=0, version=0, seq_len=TOKENS, num_ranks=1)
        assert len(batch.minibatches[0].micro_batches) == 2
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            trainer.train_step(batch)
    finally:
        trainer.shutdown()
    found, wanted = torch.cuda.max_memory_allocated() - others, estimate.total - estimate.overhead
    assert 0.85 * wanted <= found <= 1.05 * wanted
