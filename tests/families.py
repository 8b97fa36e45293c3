"""The families of models that Telescope claims to train, as data: `model_type`, and a tiny config of that type.

Windows and other boundaries in a config are shorter than the samples of the sweep (`tests.family_sweep`), so that a
sample crosses them. Weights, norms and biases are random.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 320
WINDOW = 16
"""Tokens of a sliding window, where a family has one."""

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
HEADS_OF_32 = {"head_dim": 32}
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_group": 1, "topk_group": 1}


@dataclass(frozen=True)
class Family:
    """A kind of model. `config` is laid over `TINY`; None removes a field."""

    name: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    is_fast: bool = False
    """Whether `make test` has it; `make test-all` has all."""
    reads: str = ""
    """Released models of this kind, for docs/models.md."""
    needs_gpu: bool = False
    """Whether vLLM's build for CPUs cannot serve it in float32, or not at all."""
    around: dict[str, Any] | None = None
    """The config of a wrapper with towers for other media, whose text model `config` describes. None: no wrapper."""

    @property
    def fields(self) -> dict[str, Any]:
        """Arguments of the config class."""
        merged = {name: value for name, value in (TINY | self.config).items() if value is not None}
        return merged if self.around is None else self.around | {"text_config": merged}


DENSE = [
    Family("llama", "llama", HEADS_OF_32, reads="Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2; DeepSeek-R1-Distill-Llama"),
    Family("llama tied", "llama", HEADS_OF_32 | {"tie_word_embeddings": True}),
    Family("qwen2", "qwen2", reads="Qwen2, Qwen2.5; DeepSeek-R1-Distill-Qwen; QwQ"),
    Family("qwen3", "qwen3", HEADS_OF_32, reads="Qwen3"),
    Family("mistral", "mistral", HEADS_OF_32 | {"sliding_window": WINDOW}, reads="Mistral 7B"),
    Family("ministral3", "ministral3", HEADS_OF_32, reads="Ministral 3"),
    Family("phi3", "phi3", {"rope_scaling": None}, is_fast=True, reads="Phi-3, Phi-4"),
    Family("phi", "phi", {"partial_rotary_factor": 0.5, "intermediate_size": 512}, reads="Phi-2"),
    Family("gemma", "gemma", HEADS_OF_32 | {"tie_word_embeddings": True}, reads="Gemma"),
    Family(
        "gemma2",
        "gemma2",
        HEADS_OF_32
        | WINDOWED
        | {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 5.0,
        },
        is_fast=True,
        reads="Gemma 2",
    ),
    Family(
        "gemma3_text",
        "gemma3_text",
        HEADS_OF_32 | WINDOWED | {"tie_word_embeddings": True, "query_pre_attn_scalar": 24},
        reads="Gemma 3 1B",
    ),
    Family(
        "gemma4_text",
        "gemma4_text",
        HEADS_OF_32
        | WINDOWED
        | {
            "tie_word_embeddings": True,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        reads="Gemma 4, text",
    ),
    Family("olmo", "olmo", {"clip_qkv": None}, reads="OLMo"),
    Family("olmo2", "olmo2", reads="OLMo 2"),
    Family("olmo3", "olmo3", WINDOWED, reads="OLMo 3"),
    Family("smollm3", "smollm3", {"no_rope_layers": [1, 0]}, reads="SmolLM3"),
    Family("exaone4", "exaone4", HEADS_OF_32 | WINDOWED, reads="EXAONE 4"),
    Family("seed_oss", "seed_oss", HEADS_OF_32, reads="Seed-OSS"),
    Family("hunyuan_v1_dense", "hunyuan_v1_dense", HEADS_OF_32, reads="HunYuan dense"),
    Family("starcoder2", "starcoder2", {"sliding_window": WINDOW}, reads="StarCoder 2"),
    Family("ernie4_5", "ernie4_5", HEADS_OF_32, reads="ERNIE 4.5, dense"),
    Family("glm", "glm", HEADS_OF_32, reads="GLM-4 9B"),
    Family("glm4", "glm4", HEADS_OF_32, is_fast=True, reads="GLM-4 0414"),
    Family(
        "granite",
        "granite",
        {"logits_scaling": 3.0, "attention_multiplier": 0.2, "embedding_multiplier": 5.0, "residual_multiplier": 0.5},
        is_fast=True,
        reads="Granite 3",
    ),
    Family("cohere", "cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}, reads="Command R"),
    Family(
        "cohere2",
        "cohere2",
        HEADS_OF_32 | WINDOWED | {"logit_scale": 0.25, "tie_word_embeddings": True, "sliding_window": 128},
        reads="Command R7B, Command A, up to their window",
    ),
    Family("nemotron", "nemotron", HEADS_OF_32, reads="Nemotron-4, Minitron"),
    Family("arcee", "arcee", HEADS_OF_32, reads="AFM 4.5B"),
    Family("stablelm", "stablelm", {"partial_rotary_factor": 0.5}, reads="StableLM 2"),
    Family("gpt_neox", "gpt_neox", {"num_key_value_heads": None}, reads="Pythia"),
    Family("opt", "opt", {"ffn_dim": 192, "word_embed_proj_dim": 128, "num_key_value_heads": None}, reads="OPT"),
    Family("cwm", "cwm", HEADS_OF_32 | WINDOWED, reads="CWM"),
]
EXPERT = [
    Family("qwen3_moe", "qwen3_moe", HEADS_OF_32 | EXPERTS | {"norm_topk_prob": True}, reads="Qwen3 mixtures"),
    Family(
        "qwen2_moe",
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 64},
        is_fast=True,
        reads="Qwen1.5-MoE, Qwen2-57B-A14B",
    ),
    Family("olmoe", "olmoe", EXPERTS, reads="OLMoE"),
    Family("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, reads="Mixtral"),
    Family(
        "glm4_moe",
        "glm4_moe",
        HEADS_OF_32 | ROUTED | {"first_k_dense_replace": 1, "n_shared_experts": 1},
        reads="GLM-4.5, 4.6",
    ),
    Family(
        "granitemoe",
        "granitemoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0, "attention_multiplier": 0.2},
        reads="Granite 3 mixtures",
    ),
]
IMAGES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
WRAPPERS = [
    Family(
        "gemma3",
        "gemma3",
        HEADS_OF_32 | WINDOWED | {"model_type": "gemma3_text", "tie_word_embeddings": True},
        around={
            "vision_config": IMAGES | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_index": 300,
            "boi_token_index": 301,
            "eoi_token_index": 302,
        },
        needs_gpu=True,
        reads="Gemma 3 4B to 27B, text only",
    ),
]
FAMILIES = [*DENSE, *EXPERT, *WRAPPERS]
