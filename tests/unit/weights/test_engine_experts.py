"""Claims about where the tensors of experts lie in an engine, with stand-ins for vLLM's layers of experts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.weights.probing import probe
from torch import nn

from telescope.weights.engine_experts import why_unreadable
from telescope.weights.engine_weights import tied_names

EXPERTS, HIDDEN, INNER = 3, 8, 12
PLACE = "model.layers.0.mlp.experts"


class RoutedExperts(nn.Module):
    """The parameters of a layer's experts on one rank, under the kernel named `backend`."""

    def __init__(self, tensors: dict[str, torch.Tensor], rank: int, size: int, backend: str = "TRITON") -> None:
        super().__init__()
        parts = {}
        for kind, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            parts[kind] = [tensors[f"{PLACE}.{e}.{kind}.weight"].chunk(size, dim)[rank] for e in range(EXPERTS)]
        pairs = list(zip(parts["gate_proj"], parts["up_proj"], strict=True))
        if backend == "FLASHINFER_CUTLASS":
            pairs = [(up, gate) for gate, up in pairs]
        self.w13_weight = nn.Parameter(torch.stack([torch.cat(pair) for pair in pairs]))
        self.w2_weight = nn.Parameter(torch.stack(parts["down_proj"]))
        parallel = SimpleNamespace(tp_rank=rank, tp_size=size, use_ep=False)
        self.moe_config: Any = SimpleNamespace(
            moe_parallel_config=parallel, intermediate_size_per_partition=INNER // size, hidden_dim=HIDDEN
        )
        kernel = SimpleNamespace(fused_experts=Packer() if backend == "CPU" else None)
        name = SimpleNamespace(name=backend.split(",")[0])
        self.quant_method: Any = SimpleNamespace(unquantized_backend=name, moe_kernel=kernel)
        if backend == "CPU":
            kernel.fused_experts.process_weights_after_loading(self)
        elif backend == "CPU, bound":
            self.gate_up_linear = [lambda x, w=w, b=None: x @ w.T for w in self.w13_weight]
            self.down_linear = [lambda x, w=w, b=None: x @ w.T for w in self.w2_weight]


class Packer:
    """What a kernel of a CPU does to its layer: pads the inner dimension to 16 and stores blocks of four columns."""

    def process_weights_after_loading(self, layer: Any) -> None:
        gate, up = layer.w13_weight.chunk(2, dim=1)
        inner = gate.shape[1]
        padded = torch.zeros(len(gate), 2, 16, gate.shape[2], dtype=gate.dtype)
        padded[:, 0, :inner], padded[:, 1, :inner] = gate, up
        down = torch.zeros(*layer.w2_weight.shape[:2], 16, dtype=gate.dtype)
        down[:, :, :inner] = layer.w2_weight
        layer.w13_weight = nn.Parameter(self.pack(padded.flatten(1, 2)))
        layer.w2_weight = nn.Parameter(self.pack(down))

    def pack(self, weight_ENK: torch.Tensor) -> torch.Tensor:
        blocks = weight_ENK.unflatten(2, (-1, 4)).transpose(1, 2)
        return blocks.reshape(weight_ENK.shape).contiguous()


def trainer_tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {
        f"{PLACE}.{expert}.{kind}.weight": torch.randn(shape, generator=generator).to(dtype)
        for kind, shape in shapes.items()
        for expert in range(EXPERTS)
    }


def engine(tensors: dict[str, torch.Tensor], rank: int, size: int, backend: str = "TRITON") -> Any:
    """A worker's model, whose module of experts lies where vLLM's does."""
    root: Any = nn.Module()
    at = root
    for name in PLACE.split("."):
        at.add_module(name, nn.Module())
        at = getattr(at, name)
    at.routed_experts = RoutedExperts(tensors, rank, size, backend)
    return root


def experts_of(model: Any) -> RoutedExperts:
    return model.get_submodule(f"{PLACE}.routed_experts")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["TRITON", "FLASHINFER_CUTLASS", "CPU", "CPU, bound"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_expert_is_found_under_every_kernel_at_any_size(size: int, backend: str, dtype: torch.dtype) -> None:
    tensors = trainer_tensors(dtype=dtype)
    report = probe([engine(tensors, rank, size, backend) for rank in range(size)], tensors)
    assert report.ok, str(report)
    assert report.num_tensors == 3 * EXPERTS


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return trainer_tensors()


@pytest.mark.parametrize("backend", ["TRITON", "CPU", "CPU, bound"])
@pytest.mark.parametrize("name", trainer_tensors())
def test_one_old_matrix_of_one_expert_on_one_rank_is_named_and_no_other(tensors, name: str, backend: str) -> None:
    stale = {**tensors, name: trainer_tensors(seed=1)[name]}
    models = [engine(stale if rank == 1 else tensors, rank, 2, backend) for rank in range(2)]
    assert list(probe(models, tensors).mismatched) == [name]


def test_experts_that_were_exchanged_are_named(tensors) -> None:
    models = [engine(tensors, 0, 1)]
    weight = experts_of(models[0]).w2_weight.data
    weight[[0, 2]] = weight[[2, 0]]
    assert set(probe(models, tensors).mismatched) == {f"{PLACE}.{expert}.down_proj.weight" for expert in (0, 2)}


def test_plain_weights_where_the_kernel_expects_packed_ones_fail_for_every_expert(tensors) -> None:
    """What vLLM leaves behind when it reloads experts for the CPU and does not pack them again."""
    model = engine(tensors, 0, 1, "CPU")
    loaded, plain = (experts_of(m).w13_weight.data.flatten(1) for m in (model, engine(tensors, 0, 1)))
    loaded[:, : plain.shape[1]] = plain
    wrong = set(probe([model], tensors).mismatched)
    assert wrong == {name for name in tensors if "down_proj" not in name}


def test_a_layout_that_is_not_known_is_reported_and_not_guessed(tensors) -> None:
    report = probe([engine(tensors, 0, 1, "FLASHINFER_TRTLLM")], tensors)
    assert not report.ok
    assert "layout of experts under FLASHINFER_TRTLLM is not known" in report.unaccounted[0]


def test_matrices_captured_by_functions_are_read_and_named(tensors) -> None:
    model = engine(tensors, 0, 1, "CPU, bound")
    old = experts_of(model).down_linear[1].__defaults__[0].clone() + 1.0
    experts_of(model).down_linear[1] = lambda x, w=old, b=None: x @ w.T
    assert list(probe([model], tensors).mismatched) == [f"{PLACE}.1.down_proj.weight"]


def test_functions_without_a_captured_matrix_are_reported(tensors) -> None:
    model = engine(tensors, 0, 1, "CPU, bound")
    experts_of(model).down_linear = [lambda x, handle=7, bias=None: x for _ in range(EXPERTS)]
    assert "layout of experts under CPU is not known" in probe([model], tensors).unaccounted[0]


def test_an_expert_that_was_not_sent_leaves_its_parameter_without_explanation(tensors) -> None:
    sent = {name: tensor for name, tensor in tensors.items() if name != f"{PLACE}.1.up_proj.weight"}
    assert probe([engine(tensors, 0, 1)], sent).unaccounted == [f"{PLACE}.routed_experts.w13_weight"]


def test_a_router_that_two_modules_hold_is_no_tied_parameter() -> None:
    model: Any = nn.Module()
    model.gate = nn.Linear(2, 2, bias=False)
    model.experts = nn.Module()
    model.experts.gate = model.gate
    assert tied_names(model) == {}


def test_experts_that_are_spread_over_ranks_are_not_read() -> None:
    layer = RoutedExperts(trainer_tensors(), 0, 1)
    assert why_unreadable(layer) is None
    layer.moe_config.moe_parallel_config.use_ep = True
    assert why_unreadable(layer) == "experts are spread over the ranks"
