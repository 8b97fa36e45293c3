"""Builds the policy as a megatron-core model: configuration, layers, output.

Without Transformer Engine, Megatron's own attention supports neither packed rows nor context parallelism. Two small
modules replace Megatron's in the layer specification: `PackedAttention` (`trainer.attention`, with rotary embedding by
position in the sample) and `RMSNorm` (marked for sequence parallelism). On a GPU, element-wise operations are compiled,
because megatron-core has no fused versions of them without Transformer Engine.

Invariants: a `Row` travels through the model as `packed_seq_params`. The last stage returns logprobs and entropies of
the row's predicted tokens and never logits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn

from telescope.trainer.attention import packed_attention
from telescope.trainer.backends.megatron.families import heads_of, rows_of_vocabulary
from telescope.trainer.backends.megatron.parallel import Parallel
from telescope.trainer.logprob import logprobs_of_part
from telescope.trainer.model_input import ModelInput

logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it warns about options that are chosen here on purpose


@dataclass(slots=True)
class Row:
    """This rank's part of a packed row, in place of `PackedSeqParams`."""

    data: ModelInput
    temperature: float
    cos: torch.Tensor
    """Cosines of the rotary angles of this rank's tokens, [T, 1, 1, D], in the model's dtype. `sin` likewise."""
    sin: torch.Tensor
    # Megatron reads this. The format means one sequence, which Megatron neither squeezes nor cuts.
    qkv_format: ClassVar = "sbhd"
    cp_group = local_cp_size = padding_mask = max_seqlen_q = max_seqlen_kv = total_tokens = seq_idx = None
    cu_seqlens_q = cu_seqlens_kv = cu_seqlens_q_padded = cu_seqlens_kv_padded = None

    @classmethod
    def of(cls, data: ModelInput, temperature: float, inv_freq: torch.Tensor, dtype: torch.dtype) -> Row:
        """Adds the rotary angles by position in the sample. `inv_freq` [D / 2] are the model's own frequencies."""
        angles = data.position_ids_ST[0, :, None].float() * inv_freq.to(data.position_ids_ST.device)
        angles = torch.cat([angles, angles], dim=-1)[:, None, None, :]
        return cls(data, temperature, angles.cos().to(dtype), angles.sin().to(dtype))


def compiled_on_gpus(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compiles a function of tensors [T, ...] on GPUs, once per shape of a token."""
    compiled = torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def call(*tensors: Any) -> torch.Tensor:
        if not tensors[0].is_cuda:
            return function(*tensors)
        for tensor in tensors:
            if torch.is_tensor(tensor) and tensor.shape[0] == tensors[0].shape[0]:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*tensors)

    return call


@compiled_on_gpus
def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary embedding to queries or keys [T, 1, H, D]."""
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-right, left], dim=-1) * sin


@compiled_on_gpus
def normalized(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes the root mean square norm of the last dimension. Rounds before the last product, like transformers."""
    return F.rms_norm(hidden, hidden.shape[-1:], None, eps) * weight


class PackedAttention(nn.Module):
    """Attention over a packed row. q [T, 1, H, D]; k, v [T, 1, K, D] -> [T, 1, H x D], for this rank's T tokens."""

    def __init__(self, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *,
        packed_seq_params: Row,
        **_: Any,
    ) -> torch.Tensor:
        row = packed_seq_params
        query, key = (rotated(heads, row.cos, row.sin) for heads in (query, key))
        q, k, v = (tensor.transpose(0, 2).transpose(0, 1) for tensor in (query, key, value))
        layout = row.data.layout
        assert layout is not None
        out = packed_attention(self, q, k, v, None, packed_layout=layout, scaling=self.scale)[0]
        return out.reshape(out.shape[1], 1, -1)


class RMSNorm(nn.Module):
    """Applies `normalized` instead of megatron-core's norm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # With sequence parallelism each rank sees some tokens, and Megatron sums the gradients of marked parameters.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  # it is no field of torch's

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return normalized(hidden, self.weight, self.eps)


class LastStage:
    """Megatron's `output_processor`. Returns logprobs and entropies of the row's predicted tokens, [2, N]."""

    def __init__(self, parallel: Parallel, vocab_size: int, chunk_size: int) -> None:
        self.group, self.vocab_size, self.chunk_size = parallel.tp, vocab_size, chunk_size

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: Any,
        output_weight: torch.Tensor | None,
        config: TransformerConfig,
        context: Row,
        **_: Any,
    ) -> torch.Tensor:
        weight = output_layer.weight if output_weight is None else output_weight
        # Each rank's gradient of the hidden states is a share. Both functions sum it over the group.
        if config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden_states)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)
        hidden_ND = hidden.squeeze(1).index_select(0, context.data.predicting_N)
        target_N, temperature = context.data.target_N, context.temperature
        return torch.stack(
            logprobs_of_part(hidden_ND, weight, target_N, temperature, self.chunk_size, self.group, self.vocab_size)
        )


def transformer_config(hf_config: Any, config: Any, parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    """Returns Megatron's configuration for a model."""
    heads = heads_of(hf_config)
    tp_size = parallel.tp.size()
    uses_engine = config.megatron_use_transformer_engine
    options: dict[str, Any] = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": heads.queries,
        "num_query_groups": heads.groups,
        "kv_channels": heads.size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": hf_config.model_type == "qwen2",
        "qk_layernorm": hf_config.model_type.startswith("qwen3"),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Transformer Engine's modules replace parameters that are created on the CPU, and lose their attributes.
        "use_cpu_initialization": not uses_engine,
        "transformer_impl": "transformer_engine" if uses_engine else "local",
        "perform_initialization": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": tp_size,
        "pipeline_model_parallel_size": parallel.pp.size(),
        "context_parallel_size": parallel.cp.size(),
        "expert_model_parallel_size": parallel.ep.size(),
        "sequence_parallel": config.megatron_sequence_parallel and tp_size > 1,
        "variable_seq_lengths": True,  # packed rows differ in length
        "moe_token_dispatcher_type": "alltoall",
        # Gradients are sums over tokens, because the step divides them by a count over all ranks.
        "calculate_per_token_loss": True,
        "bias_activation_fusion": torch.cuda.is_available(),  # compiled
        # These need Transformer Engine or apex.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }
    if config.megatron_fp8:
        # One scale for each 1 x 128 activations and 128 x 128 weights, computed from their own values without history.
        options |= {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    if config.megatron_gradient_checkpointing:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if num_experts := getattr(hf_config, "num_experts", None):
        options |= {
            "num_moe_experts": num_experts,
            "moe_grouped_gemm": uses_engine,
            "expert_tensor_parallel_size": 1,
            "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
            "moe_router_topk": hf_config.num_experts_per_tok,
            "moe_router_pre_softmax": not hf_config.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
        }
    return TransformerConfig(**options)


def build_stage(hf_config: Any, megatron: TransformerConfig, parallel: Parallel) -> GPTModel:
    """Builds this rank's pipeline stage with arbitrary weights."""
    layer = layer_spec(megatron)
    layers: list[ModuleSpec] = [layer] * (megatron.num_layers // parallel.pp.size())
    stage = GPTModel(
        megatron,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=rows_of_vocabulary(hf_config.vocab_size, parallel.tp.size()),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel.is_first_stage,
        post_process=parallel.is_last_stage,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="none",  # `PackedAttention` has it
    )
    padding = getattr(hf_config, "pad_token_id", None)
    if parallel.is_first_stage and padding is not None:
        stage.embedding.word_embeddings.register_forward_hook(functools.partial(_freeze_row, padding, parallel))
    return stage


def _freeze_row(padding: int, parallel: Parallel, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Blocks the gradient of the embedding of token `padding`, as `padding_idx` does."""
    ids = inputs[0]
    if module.reduce_scatter_embeddings:  # the first dimension of the output is this rank's share of the tokens
        ids = ids.transpose(0, 1).chunk(parallel.tp.size())[parallel.tp.rank()]
    return torch.where((ids == padding)[..., None], output.detach(), output)


def layer_spec(megatron: TransformerConfig) -> ModuleSpec:
    """Returns the modules of a layer for `transformer_impl`."""
    options = {"num_experts": megatron.num_moe_experts, "qk_layernorm": megatron.qk_layernorm}
    if megatron.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=True, **options)
        if megatron.num_moe_experts:
            # Uses the same checkpoint names as without Transformer Engine, so that each loads the other's.
            layer.submodules.sharded_state_dict_keys_map = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    else:
        layer = get_gpt_layer_local_spec(moe_grouped_gemm=False, normalization="RMSNorm", **options)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if megatron.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer
