"""The output layer of an engine with adapters computes as without, for any number of rows; what a sync logs."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from telescope.inference.vllm.weights import use_plain_logits


class Punica:
    """Adapters of a batch of two requests."""

    def add_lora_logits(self, logits: torch.Tensor, *_: Any) -> None:
        raise RuntimeError(f"{len(logits)} rows for 2 requests")


class TiedEmbedding(nn.Module):
    """The wrapper of an embedding that is the output layer too."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base


def test_logprobs_of_a_prompt_do_not_depend_on_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(self: Any, output: nn.Linear, hidden: torch.Tensor, bias: Any) -> torch.Tensor:
        return hidden @ output.weight.t()

    monkeypatch.setattr(LogitsProcessor, "_apply_head", product)
    monkeypatch.setattr(LogitsProcessor, "_gather_logits", lambda self, logits: logits)
    processor: Any = LogitsProcessor.__new__(LogitsProcessor)
    nn.Module.__init__(processor)
    processor.logits_as_input, processor.soft_cap, processor.scale = False, None, 2.0
    processor.vocab_size = processor.org_vocab_size = 7
    wrapper: Any = LogitsProcessorWithLoRA.__new__(LogitsProcessorWithLoRA)
    nn.Module.__init__(wrapper)
    wrapper.base_layer, wrapper.punica_wrapper, wrapper.sharded_to_full_mapping_gpu = processor, Punica(), None
    wrapper.lora_a_stacked = wrapper.lora_b_stacked = torch.zeros(1)

    output: Any = nn.Linear(4, 8, bias=False)  # with a row of padding
    output.tp_size = 1
    prompt_LD = torch.randn(5, 4)
    with pytest.raises(RuntimeError, match="5 rows for 2 requests"):
        wrapper(output, prompt_LD)
    use_plain_logits(nn.ModuleDict({"logits_processor": wrapper}))
    wanted_LV = 2.0 * (prompt_LD @ output.weight.t())[:, :7]
    assert torch.equal(wrapper(output, prompt_LD), wanted_LV)
    assert torch.equal(wrapper(TiedEmbedding(output), prompt_LD), wanted_LV)


@pytest.mark.parametrize(("layer", "is_logged"), [("Llama3RotaryEmbedding", False), ("QKVParallelLinear", True)])
def test_only_the_warning_about_rotary_tables_is_dropped(layer: str, is_logged: bool) -> None:
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    values = (logger.name, logging.WARNING, __file__, 1, "%s: Failed to load weights", (layer,), None)
    assert bool(logger.filter(logger.makeRecord(*values))) is is_logged
