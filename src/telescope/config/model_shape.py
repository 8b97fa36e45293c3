"""Sizes of a model from its `config.json`: layers, widths, parameters, KV cache.

Includes a small table of well-known models (`model_shape.yaml`), so that a plan can be printed without
access to the hub. Reading the files is `model_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from telescope.utils.data import table_of

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What architectures call the number of their experts."""

TIED_FAMILIES = ("gemma", "cohere", "smollm3")
"""Beginnings of the types whose output layer is the embedding where `config.json` does not say."""
USUAL_EXPERTS_PER_TOKEN = 8  # of Qwen3-MoE, where its `config.json` does not say


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family. It has grouped-query attention, a gated MLP (or experts) and RMS norms.

    With experts, layer i has them if `sparse_step` divides i + 1 and i is not among `dense_layers`; else an MLP.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    expert_intermediate_size: int = 0
    experts_per_token: int = USUAL_EXPERTS_PER_TOKEN
    sparse_step: int = 1
    dense_layers: frozenset[int] = frozenset()
    max_position_embeddings: int | None = None
    router_loss: float = 0.0
    """Weight of the load-balancing loss that the config switches on; the trainer has no such loss."""

    def has_experts(self, layer: int) -> bool:
        """Returns whether this layer has experts instead of one MLP."""
        return bool(self.num_experts) and (layer + 1) % self.sparse_step == 0 and layer not in self.dense_layers

    def num_sparse_layers(self, first: int = 0) -> int:
        """Layers with experts, counted from layer `first` on."""
        return sum(map(self.has_experts, range(first, self.num_layers)))

    def num_dense_layers(self, first: int = 0) -> int:
        """Layers with a plain MLP, counted from layer `first` on."""
        return self.num_layers - first - self.num_sparse_layers(first)

    @property
    def _attention_parameters(self) -> int:
        """Attention and norms of one layer."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key_value)
        if self.qkv_bias:
            attention += query + 2 * key_value
        if self.qk_norm:
            attention += 2 * self.head_dim
        return attention + 2 * self.hidden_size

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of a layer with a plain MLP."""
        return self._attention_parameters + 3 * self.hidden_size * self.intermediate_size

    @property
    def sparse_layer_parameters(self) -> int:
        """Parameters of a layer with experts, all of them and their router."""
        experts = self.num_experts * self.hidden_size * (3 * self.expert_intermediate_size + 1)
        return self._attention_parameters + experts

    @property
    def largest_layer_parameters(self) -> int:
        """Parameters of the largest layer that there is."""
        dense = self.dense_layer_parameters if self.num_dense_layers() else 0
        return max(dense, self.sparse_layer_parameters if self.num_sparse_layers() else 0)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding and of an untied output layer."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def num_parameters(self) -> int:
        layers = self.num_dense_layers() * self.dense_layer_parameters
        layers += self.num_sparse_layers() * self.sparse_layer_parameters
        return layers + self.embedding_parameters + self.hidden_size

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    @property
    def mlp_widths(self) -> tuple[int, int]:
        """Width of an MLP's arrays in a dense and a sparse layer, over all experts of a token. 0: no such layer."""
        dense = self.intermediate_size if self.num_dense_layers() else 0
        experts = min(self.num_experts, self.experts_per_token) if self.num_sparse_layers() else 0
        return dense, experts * self.expert_intermediate_size

    def activation_elements_per_token(self, mlp_width: int, *, compiled: bool = True) -> int:
        """Elements that a layer keeps per token for its backward pass.

        They have the dtype that is computed in; `mlp_width` is the MLP's. Compiled: inputs of both norms, of both
        residual additions and of the first product, queries, keys (with norms of their own also before those), values,
        the attention's output, and three arrays of the gated MLP. Not compiled: norms keep float32 copies (in half
        precision worth two elements), and the MLP four arrays.
        """
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        normed = query + key_value if self.qk_norm else 0
        if compiled:
            return 5 * self.hidden_size + 2 * query + 2 * key_value + normed + 3 * mlp_width
        return 8 * self.hidden_size + 2 * query + 2 * key_value + 3 * normed + 4 * mlp_width

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """The shape that a `config.json` states. None for an architecture whose sizes are not named as expected."""
        config = config.get("text_config", config)
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            model_type = str(config.get("model_type", ""))
            experts = int(next((config[name] for name in EXPERT_COUNTS if config.get(name)), 0))
            intermediate = int(config["intermediate_size"])
            longest = config.get("max_position_embeddings")
            per_token, step = config.get("num_experts_per_tok"), config.get("decoder_sparse_step")
            shape = cls(
                num_layers=int(config["num_hidden_layers"]),
                hidden_size=hidden,
                intermediate_size=intermediate,
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                vocab_size=int(config["vocab_size"]),
                tied_embeddings=bool(config.get("tie_word_embeddings", model_type.startswith(TIED_FAMILIES))),
                qkv_bias=bool(config.get("attention_bias", model_type.startswith("qwen2"))),
                qk_norm=model_type.startswith("qwen3"),
                num_experts=experts,
                expert_intermediate_size=int(config.get("moe_intermediate_size") or intermediate) if experts else 0,
                experts_per_token=min(experts, USUAL_EXPERTS_PER_TOKEN) if per_token is None else int(per_token),
                sparse_step=1 if step is None else int(step),
                dense_layers=frozenset(map(int, config.get("mlp_only_layers") or ()))
                | frozenset(range(int(config.get("first_k_dense_replace") or 0))),
                max_position_embeddings=None if longest is None else int(longest),
                router_loss=float(bool(config.get("output_router_logits")) * (config.get("router_aux_loss_coef") or 0)),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None
        sizes = [shape.num_layers, hidden, intermediate, heads, shape.num_kv_heads, shape.head_dim, shape.vocab_size]
        return shape if min(*sizes, shape.sparse_step) > 0 else None


def uneven_heads(num_ranks: int, num_heads: int, num_kv_heads: int) -> str | None:
    """Describes the heads that ranks of context parallelism cannot share evenly. None if they can."""
    if num_heads % num_ranks:
        return f"{num_heads} attention heads, which it must divide"
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        return f"{num_kv_heads} key and value heads, which it must divide or be a multiple of"
    return None


_KNOWN = table_of(__file__)["models"]


def known_shape(model: str) -> ModelShape | None:
    """The shape of a well-known hub model, by name; None for others."""
    name = model.rsplit("/", 1)[-1].lower()
    for suffix in ("-instruct", "-base"):
        name = name.removesuffix(suffix)
    sizes = _KNOWN.get(name)
    return None if sizes is None else ModelShape(**sizes)
