"""Claims about where trainer tensors lie in an engine, with stand-ins for vLLM's layers at any tensor-parallel size."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.weights.probing import probe
from torch import nn

from telescope.weights.engine_weights import engine_weights
from telescope.weights.fingerprint import fingerprint
from telescope.weights.plan import TensorMeta, to_hex
from telescope.weights.probe import compare

HIDDEN, INNER, VOCABULARY, HEAD = 8, 12, 10, 2
NUM_HEADS, NUM_KV_HEADS = 4, 2


class Layer(nn.Module):
    """A layer with given parameters and its place among the tensor-parallel ranks."""

    def __init__(self, rank: int, size: int, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = rank, size
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))


class ColumnParallelLinear(Layer):
    pass


class MergedColumnParallelLinear(ColumnParallelLinear):
    pass


class QKVParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear(Layer):
    pass


class VocabParallelEmbedding(Layer):
    pass


class ParallelLMHead(VocabParallelEmbedding):
    pass


class RMSNorm(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)


def trainer_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.layers.0.attn.q_proj.weight": (NUM_HEADS * HEAD, HIDDEN),
        "model.layers.0.attn.q_proj.bias": (NUM_HEADS * HEAD,),
        "model.layers.0.attn.k_proj.weight": (NUM_KV_HEADS * HEAD, HIDDEN),
        "model.layers.0.attn.k_proj.bias": (NUM_KV_HEADS * HEAD,),
        "model.layers.0.attn.v_proj.weight": (NUM_KV_HEADS * HEAD, HIDDEN),
        "model.layers.0.attn.v_proj.bias": (NUM_KV_HEADS * HEAD,),
        "model.layers.0.attn.o_proj.weight": (HIDDEN, NUM_HEADS * HEAD),
        "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN), "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER), "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def cut(tensor: torch.Tensor, rank: int, size: int, *, replicas: int = 1, dim: int = 0) -> torch.Tensor:
    """Returns a rank's part of a tensor; `replicas` neighbors have the same one."""
    return tensor.chunk(size // replicas, dim=dim)[rank // replicas]


def engine_model(tensors: dict[str, torch.Tensor], rank: int, size: int, *, tied: bool = False) -> Any:
    """What a worker of a tensor-parallel engine would hold of `tensors`."""
    replicas = max(1, size // NUM_KV_HEADS)
    attn, mlp = "model.layers.0.attn.", "model.layers.0.mlp."

    def qkv(kind: str) -> torch.Tensor:
        parts = [cut(tensors[f"{attn}q_proj.{kind}"], rank, size)]
        parts += [cut(tensors[f"{attn}{x}_proj.{kind}"], rank, size, replicas=replicas) for x in "kv"]
        return torch.cat(parts)

    def vocabulary(kind: type[Layer], name: str) -> Layer:
        padded = 16
        whole = torch.zeros(padded, HIDDEN)
        whole[:VOCABULARY] = tensors[name]
        layer: Any = kind(rank, size, weight=cut(whole, rank, size))
        first, last = (min(VOCABULARY, edge * padded // size) for edge in (rank, rank + 1))
        layer.shard_indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=last)
        return layer

    root: Any = nn.Module()
    root.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    root.model = nn.Module()
    root.model.embed_tokens = vocabulary(VocabParallelEmbedding, "model.embed_tokens.weight")
    layer: Any = nn.Module()
    layer.attn, layer.mlp = nn.Module(), nn.Module()
    layer.attn.qkv_proj = QKVParallelLinear(rank, size, weight=qkv("weight"), bias=qkv("bias"))
    layer.attn.qkv_proj.num_kv_head_replicas = replicas
    layer.attn.qkv_proj.output_sizes = [HEAD * n for n in (NUM_HEADS, NUM_KV_HEADS * replicas, NUM_KV_HEADS * replicas)]
    layer.attn.o_proj = RowParallelLinear(rank, size, weight=cut(tensors[f"{attn}o_proj.weight"], rank, size, dim=1))
    halves = [cut(tensors[f"{mlp}{x}_proj.weight"], rank, size) for x in ("gate", "up")]
    layer.mlp.gate_up_proj = MergedColumnParallelLinear(rank, size, weight=torch.cat(halves))
    layer.mlp.gate_up_proj.output_sizes = [INNER, INNER]
    down = cut(tensors[f"{mlp}down_proj.weight"], rank, size, dim=1)
    layer.mlp.down_proj = RowParallelLinear(rank, size, weight=down)
    root.model.layers = nn.ModuleList([layer])
    root.model.norm = RMSNorm(tensors["model.norm.weight"])
    if tied:
        root.lm_head = vocabulary(ParallelLMHead, "model.embed_tokens.weight")
        root.lm_head.weight = root.model.embed_tokens.weight
    else:
        root.lm_head = vocabulary(ParallelLMHead, "lm_head.weight")
    return root


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return trainer_tensors()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_tensor_is_found_at_any_tensor_parallel_size(tensors, size: int) -> None:
    report = probe([engine_model(tensors, rank, size) for rank in range(size)], tensors)
    assert report.ok, str(report)
    assert report.num_tensors == len(tensors)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", list(trainer_tensors()))
def test_one_old_tensor_on_one_rank_is_named_and_no_other(tensors, size: int, name: str) -> None:
    stale = {**tensors, name: trainer_tensors(seed=1)[name]}
    models = [engine_model(stale if rank == 0 else tensors, rank, size) for rank in range(size)]
    assert list(probe(models, tensors).mismatched) == [name]


@pytest.mark.parametrize("size", [1, 2])
def test_exchanged_slices_of_a_fused_projection_are_named(tensors, size: int) -> None:
    k, v = "model.layers.0.attn.k_proj.weight", "model.layers.0.attn.v_proj.weight"
    swapped = {**tensors, k: tensors[v], v: tensors[k]}
    report = probe([engine_model(swapped, rank, size) for rank in range(size)], tensors)
    assert set(report.mismatched) == {k, v}


def test_ranks_that_hold_each_others_part_are_caught(tensors) -> None:
    models = [engine_model(tensors, rank, 2) for rank in range(2)]
    first, second = (m.model.layers[0].mlp.down_proj for m in models)
    first.weight, second.weight = second.weight, first.weight
    assert list(probe(models, tensors).mismatched) == ["model.layers.0.mlp.down_proj.weight"]


def test_a_tied_output_layer_is_a_second_place_of_the_embedding() -> None:
    tensors = {name: tensor for name, tensor in trainer_tensors().items() if name != "lm_head.weight"}
    models = [engine_model(tensors, rank, 2, tied=True) for rank in range(2)]
    assert probe(models, tensors).ok
    for model in models:  # what a reload leaves behind that renews only one of the two
        model.lm_head.cpu_linear = object()
        old = model.lm_head.weight + 1
        model.lm_head.quant_method = SimpleNamespace(apply=lambda layer, x, bias, old=old: x @ old.T)
    report = probe(models, tensors)
    assert list(report.mismatched) == ["model.embed_tokens.weight"]
    assert "lm_head.weight as packed" in report.mismatched["model.embed_tokens.weight"]


def test_a_packed_weight_is_read_through_the_operator_that_uses_it() -> None:
    """The plain weight is gone, as after packing for the CPU; more columns than are multiplied at a time."""
    weight = torch.randn(5, 600)
    layer: Any = RowParallelLinear(0, 1, weight=torch.empty(0))
    layer.cpu_linear = object()
    layer.quant_method = SimpleNamespace(apply=lambda layer, x, bias: x @ weight.T)
    model = nn.Module()
    model.down_proj = layer
    tensors = {"down_proj.weight": weight}
    assert probe([model], tensors).ok
    weight = weight + 1e-6
    assert not probe([model], tensors).ok


def test_a_bias_that_the_engine_widened_is_matched_exactly_or_reported() -> None:
    bias = torch.randn(6).to(torch.bfloat16)
    model = nn.Module()
    model.proj = Layer(0, 1, bias=bias.float())
    assert probe([model], {"proj.bias": bias}, torch.bfloat16).ok
    model.proj = Layer(0, 1, bias=bias.float() * (1 + 2**-20))
    assert "do not fit" in probe([model], {"proj.bias": bias}, torch.bfloat16).mismatched["proj.bias"]


def test_a_parameter_that_nothing_was_sent_for_is_reported(tensors) -> None:
    sent = {name: tensor for name, tensor in tensors.items() if "up_proj" not in name}
    report = probe([engine_model(tensors, 0, 1)], sent)
    assert report.unaccounted == ["model.layers.0.mlp.gate_up_proj.weight"]
    assert not report.ok


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_projection_that_checkpoints_fuse_too_is_divided_as_the_engine_divides_its_parts(tensors, size: int) -> None:
    """Phi-3 and GLM-4 have one `qkv_proj` or `gate_up_proj` in their files; a rank has its share of every part."""
    models = [engine_model(tensors, rank, size) for rank in range(size)]
    attn, mlp = "model.layers.0.attn.", "model.layers.0.mlp."
    fused = {
        f"{attn}qkv_proj.weight": torch.cat([tensors.pop(f"{attn}{x}_proj.weight") for x in "qkv"]),
        f"{attn}qkv_proj.bias": torch.cat([tensors.pop(f"{attn}{x}_proj.bias") for x in "qkv"]),
        f"{mlp}gate_up_proj.weight": torch.cat([tensors.pop(f"{mlp}{x}_proj.weight") for x in ("gate", "up")]),
    }
    report = probe(models, tensors | fused)
    assert report.ok, str(report)
    for name in fused:
        changed = fused | {name: fused[name].flip(0)}
        assert list(probe(models, tensors | changed).mismatched) == [name]


def test_keys_that_are_also_the_values_are_looked_for_in_both_places(tensors) -> None:
    attn = "model.layers.0.attn."
    tensors |= {f"{attn}v_proj.{kind}": tensors[f"{attn}k_proj.{kind}"] for kind in ("weight", "bias")}
    models = [engine_model(tensors, rank, 2) for rank in range(2)]
    sent = {name: tensor for name, tensor in tensors.items() if ".v_proj." not in name}
    assert probe(models, sent).ok
    with torch.no_grad():
        models[1].model.layers[0].attn.qkv_proj.weight[-1] += 1  # of the values
    assert list(probe(models, sent).mismatched) == [f"{attn}k_proj.weight"]


def test_a_buffer_that_is_sent_is_compared_and_one_of_the_engine_alone_is_not() -> None:
    model: Any = nn.Module()
    model.register_buffer("layer_scalar", torch.tensor([0.5]))
    model.register_buffer("cos_sin_cache", torch.zeros(3))
    assert probe([model], {"layer_scalar": torch.tensor([0.5])}).ok
    assert list(probe([model], {"layer_scalar": torch.tensor([0.25])}).mismatched) == ["layer_scalar"]


@dataclass
class Renames:
    """What vLLM's mapper does to a name: it renames also the components of fused layers, as the layer."""

    orig_to_new_stacked: dict[str, tuple[str, str]] = field(default_factory=dict)

    def _map_name(self, name: str) -> str | None:
        for component, (fused, _) in self.orig_to_new_stacked.items():
            name = name.replace(component, fused)
        return None if name.startswith("mtp.") else name.replace("model.language_model.", "language_model.model.")


def test_layers_that_are_fused_by_the_engines_table_alone_are_found(tensors) -> None:
    model = engine_model(tensors, 0, 1)
    model.packed_modules_mapping = {}
    fused = {f".{kind}_proj": (".qkv_proj", kind) for kind in "qkv"}
    model.model.hf_to_vllm_mapper = Renames(
        fused | {".gate_proj": (".gate_up_proj", "0"), ".up_proj": (".gate_up_proj", "1")}
    )
    assert probe([model], tensors).ok


def test_names_are_those_of_the_engines_own_table_and_what_it_drops_is_not_missed() -> None:
    model: Any = nn.Module()
    model.hf_to_vllm_mapper = Renames()
    model.language_model = nn.Module()
    model.language_model.model = nn.Module()
    model.language_model.model.norm = RMSNorm(torch.ones(4))
    sent = {"model.language_model.norm.weight": torch.ones(4), "mtp.norm.weight": torch.zeros(4)}
    model.vision_tower = nn.Identity()  # left out, because the engine serves text alone
    sent["vision_tower.norm.weight"] = torch.zeros(4)
    report = probe([model], sent)
    assert report.ok, str(report)
    sent["model.language_model.norm.weight"] += 1
    assert list(probe([model], sent).mismatched) == ["model.language_model.norm.weight"]


def test_a_parameter_that_the_engine_keeps_in_float32_is_compared_in_the_dtype_in_which_it_was_sent() -> None:
    bias, engine = torch.tensor([1.0, 1.0 + 2**-20]), nn.Module()
    engine.gate = nn.Module()
    engine.gate.bias = nn.Parameter(bias.clone())
    sent = {"gate.bias": to_hex(fingerprint(bias))}
    for dtype, ok in (("float32", True), ("bfloat16", False)):
        loaded = {**engine_weights(engine, [TensorMeta("gate.bias", (2,), dtype)]), "shapes": {"gate.bias": (2,)}}
        assert compare(sent=sent, loaded=[loaded]).ok is ok
