"""Staging buffers, on plain torch modules that load as vLLM's layers do."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from telescope.weights.receiver import ReceiveBuffers, StagingBuffers, why_in_place


class UnquantizedLinearMethod:
    pass


class Fp8LinearMethod:
    pass


class FusedLinear(nn.Module):
    """Two projections in one weight. Its parameter carries its loader, bound to this very layer, as in vLLM."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method: Any = UnquantizedLinearMethod()
        self.weight = nn.Parameter(torch.zeros(6, 3), requires_grad=False)
        self.weight.weight_loader = self.load_part  # type: ignore[assignment]
        self.register_buffer("table", torch.arange(3.0))

    def load_part(self, parameter: nn.Parameter, loaded: torch.Tensor, part: int) -> None:
        parameter.data[4 * part : 4 * part + len(loaded)].copy_(loaded)


class Model(nn.Module):
    """An embedding that the output layer shares, and a fused layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.layer = FusedLinear()
        self.again = self.layer
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids) @ self.layer.weight[:3].T + self.layer.table)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name.startswith("layer."):
                parameter: Any = parameters["layer.weight"]
                parameter.weight_loader(parameter, tensor, int(name == "layer.v.weight"))
            else:
                parameters[name].data.copy_(tensor)


def new_weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed.weight": (5, 3), "layer.q.weight": (4, 3), "layer.v.weight": (2, 3)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_loading_changes_the_staging_buffers_and_not_the_model() -> None:
    model = Model()
    before, ids = state(model), torch.tensor([1, 4])
    answer = model(ids)
    staging = StagingBuffers(model)
    staging.load(new_weights())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(ids), answer)


def test_a_swap_equals_the_models_own_loader_and_moves_no_parameter() -> None:
    model, other = Model(), Model()
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    staging = StagingBuffers(model)
    staging.load(new_weights())
    staging.swap()
    other.load_weights(new_weights())
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    assert model.head.weight is model.embed.weight


def test_a_tensor_that_was_not_sent_keeps_its_value_over_a_swap() -> None:
    model = Model()
    before = state(model)
    staging = StagingBuffers(model)
    staging.load(new_weights()[1:])
    staging.swap()
    assert torch.equal(model.embed.weight, before["embed.weight"])
    assert not torch.equal(model.layer.weight, before["layer.weight"])


def test_shared_parameters_and_layers_have_one_staging_buffer() -> None:
    model = Model()
    assert StagingBuffers(model).num_bytes == sum(p.numel() * 4 for p in model.parameters()) == 4 * (15 + 18)


def test_a_staging_buffer_has_the_loader_of_its_parameter() -> None:
    model = Model()
    staging = StagingBuffers(model)
    staged: Any = staging._tree.layer.weight
    assert staged.weight_loader == model.layer.load_part
    assert staged is not model.layer.weight
    assert staging._tree.again is staging._tree.layer


@pytest.mark.parametrize("kind", ["quantized", "experts", "latent attention", "packed", "empty"])
def test_a_model_that_computes_with_anything_but_its_parameters_has_no_staging_buffers(kind: str) -> None:
    model: Any = Model()
    assert why_in_place(model) is None
    handler = object()
    if kind == "quantized":
        model.layer.quant_method = Fp8LinearMethod()
    elif kind == "experts":
        model.experts = type("FusedMoE", (nn.Module,), {})()
    elif kind == "latent attention":
        model.attention = type("MLAAttention", (nn.Module,), {})()
    elif kind == "packed":
        model.layer.cpu_linear = lambda x: (handler, x)
    else:
        model.layer.weight.data = torch.empty(0)
    reason = why_in_place(model)
    assert ("layer" in reason) or kind in reason


def test_a_layer_of_the_cpu_that_computes_with_its_plain_weight_can_have_staging_buffers() -> None:
    model: Any = Model()
    model.layer.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, weight, bias)
    assert why_in_place(model) is None


def test_the_reasons_do_not_fill_the_screen() -> None:
    model: Any = nn.ModuleList([FusedLinear() for _ in range(40)])
    for layer in model:
        layer.quant_method = SimpleNamespace()
    reason = why_in_place(model)
    assert reason.endswith("and 37 more")


def test_receive_buffers_alternate_and_are_made_anew_only_when_they_are_too_small() -> None:
    buffers, cpu = ReceiveBuffers(), torch.device("cpu")

    def address(index: int, size: int, dtype: torch.dtype = torch.float32) -> int:
        taken = buffers.take(index, size, dtype, cpu, False)
        assert (taken.numel(), taken.dtype) == (size, dtype)
        return taken.data_ptr()

    first, second = address(0, 100), address(1, 50)
    assert first != second
    assert (address(2, 80), address(3, 50)) == (first, second)
    assert buffers.take(4, 100, torch.float32, cpu, False).data_ptr() == first
    assert buffers.take(5, 5000, torch.float32, cpu, False).untyped_storage().nbytes() == 20_000
    assert buffers.take(6, 10, torch.bfloat16, cpu, False).dtype == torch.bfloat16
