"""Claims about block-quantized parameters of an engine, with stand-ins for vLLM's layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.weights import probing
from tests.unit.weights.probing import metas_of
from torch import nn

from telescope.weights.engine_weights import engine_weights, quantized_reference
from telescope.weights.probe import ProbeReport

BLOCK = 128
FP8_MAX = 448.0
SMALLEST_MAXIMUM = 1e-4
HIDDEN, QUERY, KEY = 256, 320, 64  # blocks lie across the borders of q, k and v
EXPERTS, INNER = 2, 128
ATTENTION, MLP = "model.layers.0.attn", "model.layers.0.mlp.experts"


def quantize_blocks(weight_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Describes vLLM's `per_block_cast_to_fp8`."""
    rows, columns = weight_RC.shape
    padded = weight_RC.new_zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = weight_RC
    blocks = padded.view(-1, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(SMALLEST_MAXIMUM)
    scale = largest / FP8_MAX
    quantized = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn)
    return quantized.view_as(padded)[:rows, :columns], scale.view(blocks.shape[0], blocks.shape[2])


class Fp8PerBlockOnlineLinearMethod:
    pass


class Fp8PerBlockOnlineMoEMethod:
    fp8_backend = SimpleNamespace(name="TRITON")


class QKVParallelLinear(nn.Module):
    tp_rank, tp_size, num_kv_head_replicas = 0, 1, 1
    output_sizes = (QUERY, KEY, KEY)


class RoutedExperts(nn.Module):
    moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_rank=0, tp_size=1, use_ep=False))


def trainer_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for kind, size in (("q", QUERY), ("k", KEY), ("v", KEY)):
        shapes |= {f"{ATTENTION}.{kind}_proj.weight": (size, HIDDEN), f"{ATTENTION}.{kind}_proj.bias": (size,)}
    for expert in range(EXPERTS):
        shapes |= {f"{MLP}.{expert}.{kind}_proj.weight": (INNER, HIDDEN) for kind in ("gate", "up")}
        shapes[f"{MLP}.{expert}.down_proj.weight"] = (HIDDEN, INNER)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def engine_model(tensors: dict[str, torch.Tensor]) -> Any:
    """A worker's model that has loaded and quantized `tensors`."""
    root: Any = nn.Module()
    root.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    root.model = nn.Module()
    layer: Any = nn.Module()
    layer.attn, layer.mlp = nn.Module(), nn.Module()
    root.model.layers = nn.ModuleList([layer])
    qkv: Any = QKVParallelLinear()
    qkv.quant_method = Fp8PerBlockOnlineLinearMethod()
    values, scales = quantize_blocks(torch.cat([tensors[f"{ATTENTION}.{kind}_proj.weight"] for kind in "qkv"]))
    qkv.weight, qkv.weight_scale_inv = frozen(values.clone()), frozen(scales)
    qkv.bias = frozen(torch.cat([tensors[f"{ATTENTION}.{kind}_proj.bias"] for kind in "qkv"]))
    layer.attn.qkv_proj = qkv
    experts: Any = RoutedExperts()
    experts.quant_method = Fp8PerBlockOnlineMoEMethod()
    for name, kinds in (("w13_weight", ("gate", "up")), ("w2_weight", ("down",))):
        matrices = [torch.cat([tensors[f"{MLP}.{e}.{kind}_proj.weight"] for kind in kinds]) for e in range(EXPERTS)]
        pairs = [quantize_blocks(matrix) for matrix in matrices]
        setattr(experts, name, frozen(torch.stack([pair[0] for pair in pairs])))
        setattr(experts, name + "_scale_inv", frozen(torch.stack([pair[1] for pair in pairs])))
    layer.mlp.experts = experts
    return root


def probe(model: Any, sent: dict[str, torch.Tensor], arrived: dict[str, torch.Tensor]) -> ProbeReport:
    """Verifies a model after an update in which `sent` was sent and `arrived` arrived."""
    reference = quantized_reference(model, metas_of(sent), quantize_blocks)
    for name, tensor in arrived.items():
        reference.observe(name, tensor)
    return probing.probe([model], sent, reference=reference)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return trainer_tensors()


def test_quantized_layers_count_as_the_tensors_that_they_were_made_of(tensors) -> None:
    report = probe(engine_model(tensors), tensors, tensors)
    assert report.ok, str(report)
    assert report.num_tensors == len(tensors)


@pytest.mark.parametrize("name", [f"{ATTENTION}.k_proj.weight", f"{MLP}.1.up_proj.weight", f"{MLP}.0.down_proj.weight"])
def test_a_layer_that_was_quantized_of_older_weights_is_named(tensors, name: str) -> None:
    stale = {**tensors, name: trainer_tensors(seed=1)[name]}
    report = probe(engine_model(stale), tensors, tensors)
    assert name in report.mismatched
    assert "quantized values are not those" in report.mismatched[name]


def test_one_wrong_scale_is_detected(tensors) -> None:
    model = engine_model(tensors)
    model.model.layers[0].attn.qkv_proj.weight_scale_inv[1, 0] *= 1.0001
    report = probe(model, tensors, tensors)
    assert "quantized scales are not those" in report.mismatched[f"{ATTENTION}.q_proj.weight"]
    assert f"{MLP}.0.down_proj.weight" not in report.mismatched


def test_a_tensor_that_arrived_with_another_bit_is_named_alone(tensors) -> None:
    name = f"{MLP}.0.gate_proj.weight"
    corrupt = {**tensors, name: tensors[name].clone()}
    corrupt[name].view(torch.int16)[3, 5] ^= 1
    report = probe(engine_model(corrupt), tensors, corrupt)
    assert list(report.mismatched) == [name]


def test_a_layer_of_which_a_tensor_is_missing_does_not_pass(tensors) -> None:
    name = f"{ATTENTION}.v_proj.weight"
    report = probe(engine_model(tensors), tensors, {key: tensor for key, tensor in tensors.items() if key != name})
    assert "not all of its tensors arrived" in report.mismatched[name]


def test_without_an_observed_update_quantized_layers_are_reported(tensors) -> None:
    answer = engine_weights(engine_model(tensors), metas_of(tensors))
    assert [entry.split(" ")[0] for entry in answer["unaccounted"]] == [
        f"{ATTENTION}.qkv_proj.weight", f"{MLP}.w13_weight", f"{MLP}.w2_weight",
    ]  # fmt: skip


def test_a_model_without_quantized_layers_needs_no_second_quantization() -> None:
    assert quantized_reference(nn.Linear(4, 4), [], quantize_blocks) is None
