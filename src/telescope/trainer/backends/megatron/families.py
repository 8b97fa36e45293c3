"""Lists the parameters of each model family with their Megatron and Hugging Face names.

Each family has a table. Loading, export, their order and the parts of each rank follow from it (`conversion`), so a new
family of plain transformers only needs a new table. `refuse_other_names` raises an error if model and table have
different tensors.

Megatron keeps the queries, keys and values of a layer in one matrix, group by group (all queries of a key-value head,
its key, its value), and the two matrices of a gated feed-forward in one, gate above up. A rank of a tensor-parallel
group has some groups, some rows of both, some columns of the matrices after them, and some rows of the vocabulary's
tables.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from telescope.errors import UserError
from telescope.utils.text import listed

Kind = Literal["whole", "columns", "vocabulary", "qkv", "gate_up"]

VOCABULARY_MULTIPLE = 128
"""The rows of a vocabulary's table on each rank are a multiple of this, which aligns its products."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A Megatron parameter, and the checkpoint's tensors of which it consists.

    `{layer}` and `{expert}` in the names are numbers in the whole model.
    """

    parameter: str
    tensors: tuple[str, ...]
    kind: Kind = "whole"


_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_EXPERT, _HF_EXPERT = _MEGATRON + "mlp.experts.local_experts.{expert}.", _HF + "mlp.experts.{expert}."


def _qkv(leaf: str) -> Entry:
    names = tuple(f"{_HF}self_attn.{name}_proj.{leaf}" for name in "qkv")
    return Entry(f"{_MEGATRON}self_attention.linear_qkv.{leaf}", names, "qkv")


EMBEDDING = Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary")
FINAL = (
    Entry("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Entry("output_layer.weight", ("lm_head.weight",), "vocabulary"),
)
ATTENTION = (
    Entry(_MEGATRON + "input_layernorm.weight", (_HF + "input_layernorm.weight",)),
    _qkv("weight"),
    Entry(_MEGATRON + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), "columns"),
    Entry(_MEGATRON + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",)),
)
HEAD_NORMS = (
    Entry(_MEGATRON + "self_attention.q_layernorm.weight", (_HF + "self_attn.q_norm.weight",)),
    Entry(_MEGATRON + "self_attention.k_layernorm.weight", (_HF + "self_attn.k_norm.weight",)),
)
DENSE = (
    Entry(_MEGATRON + "mlp.linear_fc1.weight", (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"), "gate_up"),
    Entry(_MEGATRON + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), "columns"),
)
# Every rank has some of the experts, each of them whole.
EXPERTS = (
    Entry(_MEGATRON + "mlp.router.weight", (_HF + "mlp.gate.weight",)),
    Entry(_EXPERT + "linear_fc1.weight", (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight"), "gate_up"),
    Entry(_EXPERT + "linear_fc2.weight", (_HF_EXPERT + "down_proj.weight",)),
)

_FUSED_EXPERT = _MEGATRON + "mlp.experts."
TRANSFORMER_ENGINE_NAMES = {
    _MEGATRON + "input_layernorm.weight": _MEGATRON + "self_attention.linear_qkv.layer_norm_weight",
    _MEGATRON + "pre_mlp_layernorm.weight": _MEGATRON + "mlp.linear_fc1.layer_norm_weight",
    _EXPERT + "linear_fc1.weight": _FUSED_EXPERT + "linear_fc1.weight{expert}",
    _EXPERT + "linear_fc2.weight": _FUSED_EXPERT + "linear_fc2.weight{expert}",
}
"""The names of parameters with Transformer Engine, which fuses norms with the following layers, and experts."""
NORM_OF_ROUTER = _MEGATRON + "pre_mlp_layernorm.weight"
"""This norm is not fused in a mixture of experts, because the router reads its output too."""

LAYERS: dict[str, tuple[Entry, ...]] = {
    "llama": (*ATTENTION, *DENSE),
    "qwen2": (*ATTENTION, _qkv("bias"), *DENSE),
    "qwen3": (*ATTENTION, *HEAD_NORMS, *DENSE),
    "qwen3_moe": (*ATTENTION, *HEAD_NORMS, *EXPERTS),
}
"""The tensors of a layer by `model_type` of a config."""


@dataclass(frozen=True, slots=True)
class ParameterMapping:
    """An entry with its numbers. `layer` is None outside of layers; `expert` is None outside of experts."""

    entry: Entry
    layer: int | None = None
    expert: int | None = None

    @property
    def names(self) -> list[str]:
        """The names of the tensors in the checkpoint."""
        return [name.format(layer=self.layer, expert=self.expert) for name in self.entry.tensors]


def mappings_of(hf_config: Any, *, transformer_engine: bool = False) -> list[ParameterMapping]:
    """Returns a model's parameters in order. Its family must have a table.

    With `transformer_engine`, parameters have the names of Transformer Engine's modules.
    """
    experts = range(getattr(hf_config, "num_experts", None) or 0)
    mappings = [ParameterMapping(EMBEDDING)]
    entries = LAYERS[hf_config.model_type]
    if transformer_engine:
        other = {old: new for old, new in TRANSFORMER_ENGINE_NAMES.items() if not (experts and old == NORM_OF_ROUTER)}
        entries = tuple(replace(entry, parameter=other.get(entry.parameter, entry.parameter)) for entry in entries)
    for layer in range(hf_config.num_hidden_layers):
        for entry in entries:
            numbers: Iterable[int | None] = experts if "{expert}" in entry.parameter else (None,)
            mappings += [ParameterMapping(entry, layer, expert) for expert in numbers]
    mappings += [ParameterMapping(entry) for entry in FINAL]
    return mappings[:-1] if hf_config.tie_word_embeddings else mappings


def refuse_other_names(mappings: Sequence[ParameterMapping], names: Iterable[str]) -> None:
    """Raises `UserError` unless `mappings` have exactly the tensors in `names`."""
    known, actual = {name for mapping in mappings for name in mapping.names}, set(names)
    if missing := sorted(actual - known):
        raise UserError(
            f"model: train_backend megatron has no mapping for {listed(missing)}. Use another model, or train_backend "
            "fsdp"
        )
    if missing := sorted(known - actual):
        raise UserError(f"model: it lacks {listed(missing)}, which train_backend megatron expects of its type")


@dataclass(frozen=True, slots=True)
class Heads:
    """The numbers of query and key-value heads of the whole model, and the size of a head."""

    queries: int
    groups: int
    size: int


def heads_of(hf_config: Any) -> Heads:
    """Returns the attention heads of a model."""
    queries = hf_config.num_attention_heads
    size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // queries
    return Heads(queries, hf_config.num_key_value_heads, size)


def rows_of_vocabulary(vocab_size: int, tp_size: int) -> int:
    """Returns the padded rows of the vocabulary's tables, which a tensor-parallel group divides."""
    multiple = VOCABULARY_MULTIPLE * tp_size
    return -(-vocab_size // multiple) * multiple


def local_part(kind: Kind, tensors: Sequence[Any], heads: Heads, tp_rank: int, tp_size: int) -> torch.Tensor:
    """Returns rank `tp_rank`'s part of a parameter.

    `tensors` are the checkpoint's: torch tensors, or slices of a file, of which only this part is read.
    """

    def rows(tensor: Any) -> torch.Tensor:
        size = _shape(tensor)[0] // tp_size
        return tensor[tp_rank * size : (tp_rank + 1) * size]

    if kind == "gate_up":
        return torch.cat([rows(tensor) for tensor in tensors])
    if kind == "qkv":
        groups = heads.groups // tp_size
        by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in map(rows, tensors)]
        whole = torch.cat(by_group, dim=1)
        return whole.reshape(-1, *whole.shape[2:])
    (tensor,) = tensors
    if kind == "columns":
        size = _shape(tensor)[1] // tp_size
        return tensor[:, tp_rank * size : (tp_rank + 1) * size]
    if kind == "vocabulary":
        vocab_size = _shape(tensor)[0]
        size = rows_of_vocabulary(vocab_size, tp_size) // tp_size
        part = tensor[min(tp_rank * size, vocab_size) : min((tp_rank + 1) * size, vocab_size)]
        return torch.cat([part, part.new_zeros(size - part.shape[0], *part.shape[1:])])
    return tensor[:]


def whole_tensors(kind: Kind, parts: Sequence[torch.Tensor], heads: Heads, vocab_size: int) -> Iterator[torch.Tensor]:
    """Yields a parameter's tensors from the parts of all ranks. Inverse of `local_part`."""
    if kind == "gate_up":
        halves = [part.chunk(2) for part in parts]
        yield from (torch.cat([half[index] for half in halves]) for index in (0, 1))
    elif kind == "qkv":
        whole = torch.cat(list(parts))
        per_group = heads.queries // heads.groups
        by_group = whole.reshape(heads.groups, per_group + 2, heads.size, *whole.shape[1:])
        for index in (slice(0, per_group), slice(per_group, per_group + 1), slice(per_group + 1, per_group + 2)):
            yield by_group[:, index].reshape(-1, *whole.shape[1:])
    elif kind == "columns":
        yield torch.cat(list(parts), dim=1)
    elif kind == "vocabulary":
        yield torch.cat(list(parts))[:vocab_size]
    else:
        yield parts[0]


def _shape(tensor: Any) -> Sequence[int]:
    return tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape()
