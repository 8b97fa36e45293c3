"""The policy: a transformers model that returns logprobs instead of logits.

Owns loading and the changes of the loaded model: packed attention, the output layer, no dropout. Does not own sharding.
Invariant: parameter names without `PREFIX` are those of transformers.

`checkpoint_tensors` converts experts to the names of checkpoints, as views without copies: transformers has
`mlp.experts.gate_up_proj` [experts, 2 x inner, hidden] (gate rows above up rows) and `mlp.experts.down_proj` [experts,
hidden, inner], while the released files of Qwen3-MoE, and vLLM in every version, have three matrices per expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from telescope.config.model_contents import listed
from telescope.errors import UserError
from telescope.trainer.attention import ATTENTION_NAME, register_attention
from telescope.trainer.logprob import LogprobHead
from telescope.trainer.model_input import ModelInput
from telescope.trainer.timeline import Timeline
from telescope.utils.text import single_line

PREFIX = "causal_lm."

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
"""Config fields with which some architectures change the logits after the output layer."""

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""The `layer_types` of a model config in which only attention mixes tokens."""


def compute_dtype(config: Any) -> torch.dtype:
    """Returns the dtype of activations and of gathered weights."""
    return DTYPES[config.mixed_precision_dtype or config.model_dtype]


class PolicyModel(nn.Module):
    """Maps a packed row to logprob and entropy of chosen tokens."""

    def __init__(self, causal_lm: PreTrainedModel, chunk_size: int) -> None:
        super().__init__()
        output = causal_lm.get_output_embeddings()
        causal_lm.set_output_embeddings(LogprobHead(output.weight, getattr(output, "bias", None), chunk_size))
        self.causal_lm: PreTrainedModel = causal_lm
        # Dropout would make the trainer's logprobs differ from the engine's.
        self.eval()

    @property
    def decoder(self) -> nn.Module:
        """The transformer without its output layer."""
        return self.causal_lm.get_decoder()

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's blocks, in order."""
        layers = self.decoder.layers
        assert isinstance(layers, nn.ModuleList)
        return list(layers)

    @property
    def head(self) -> LogprobHead:
        """The output layer."""
        return self.causal_lm.get_output_embeddings()

    @property
    def head_dim(self) -> int:
        """The size of one attention head."""
        config = self.causal_lm.config
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @property
    def is_tied(self) -> bool:
        """Returns whether the output layer's weight is the embedding's."""
        return self.head.weight is self.causal_lm.get_input_embeddings().weight

    def forward(
        self, row: ModelInput, temperature: float, timeline: Timeline, micro_batch: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes logprob and entropy, each [N], of the row's predicted tokens."""
        with timeline.span("forward", micro_batch):
            hidden_TD = self.decoder(
                input_ids=row.token_ids_T.unsqueeze(0),
                position_ids=row.position_ids_T.unsqueeze(0),
                use_cache=False,
                packed_layout=row.layout,
            ).last_hidden_state.squeeze(0)
        with timeline.span("compute_entropy", micro_batch):
            return self.head(hidden_TD.index_select(0, row.predicting_N), row.target_N, temperature)


def load_causal_lm(
    model: str, dtype: torch.dtype, *, with_weights: bool, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Loads a model from a path or hub id. With weights it is on the CPU, without on the meta device.

    Raises `UserError` if there is no such model, and for one that changes its logits after the output layer or would
    mix packed samples.
    """
    register_attention()
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(model, **options)
    except (OSError, ValueError) as error:
        raise UserError(f"model: {model!r} cannot be loaded: {single_line(str(error))}") from error
    for name in LOGIT_CHANGES:
        if getattr(config, name, None) not in (None, 1.0, 1):
            raise UserError(
                f"model: {model!r} sets {name}, which the trainer's output layer does not implement: choose another"
            )
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # only needed for a loss that balances experts
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if isinstance(architecture, type):
        named = list(config.architectures or ())
        if architecture.__name__ not in named:  # such as an encoder
            raise UserError(
                f"model: {model!r} has architectures {named} in config.json instead of {architecture.__name__}, so "
                "that vLLM does not load it as a language model. Choose a model that generates text, or correct "
                "config.json"
            )
        refuse_unpackable(model, architecture, config)
    elif not hasattr(config, "auto_map"):  # no code that comes with the model
        raise UserError(f"model: {model!r} is of type {config.model_type}, which is no causal language model")
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    options |= {"attn_implementation": ATTENTION_NAME, "dtype": dtype}
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # torch's grouped product of experts does not support float64
    if with_weights:
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        found: Any = AutoModelForCausalLM.from_pretrained(model, config=config, **options)
        causal_lm, loaded = found
        refuse_incomplete(model, loaded)
        return causal_lm
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **options)


def refuse_incomplete(model: str, loaded: Mapping[str, Any]) -> None:
    """Raises `UserError` for random tensors and unused weights after loading."""
    problems = [
        f"{what}: {listed(sorted(_key_text(key) for key in loaded[kind]))}"
        for kind, what in (
            ("missing_keys", "its weight files lack tensors"),
            ("mismatched_keys", "tensors in its weight files have other sizes than in config.json"),
            ("unexpected_keys", "its weight files hold tensors that the architecture does not have"),
        )
        if loaded.get(kind)
    ]
    if problems:
        raise UserError(
            f"model: {model!r} cannot be trained, because {'; '.join(problems)}. Download or save the model again, or "
            "correct config.json"
        )


def _key_text(key: Any) -> str:
    """Formats a name as reported by transformers. A mismatch has both shapes."""
    return key if isinstance(key, str) else f"{key[0]} with {list(key[1])} instead of {list(key[2])}"


def refuse_unpackable(model: str, architecture: type, config: Any) -> None:
    """Raises `UserError` for models that mix tokens outside of attention.

    Samples are concatenated in one row and only attention knows their boundaries: a recurrence or a convolution over
    the row would mix samples without any error.
    """
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if getattr(architecture, "_is_stateful", False) or others:
        raise UserError(
            f"model: {model!r} ({architecture.__name__}) has layers other than attention that mix tokens"
            f"{': ' + ', '.join(others) if others else ''}. They would mix packed samples. Choose a model "
            "whose layers are all attention"
        )
    if not getattr(architecture, "_supports_attention_backend", False):
        raise UserError(
            f"model: {model!r} ({architecture.__name__}) has an attention that cannot be replaced and would mix "
            "packed samples. Choose a model that supports transformers' AttentionInterface"
        )


GATE_UP = ".mlp.experts.gate_up_proj"
DOWN = ".mlp.experts.down_proj"


def can_be_compiled(model: nn.Module, dtype: torch.dtype) -> bool:
    """Returns whether blocks of this model can be compiled for `dtype`.

    The grouped product of experts can be compiled in bfloat16 only; in other dtypes its backward pass is Python, and
    compiling fails for each block.
    """
    return dtype == torch.bfloat16 or not any(name.endswith(GATE_UP) for name, _ in model.named_parameters())


def checkpoint_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a parameter's tensors, also meta ones, by their checkpoint names, which differ for experts only."""
    if tensor.ndim == 3 and name.endswith((GATE_UP, DOWN)):
        prefix, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(tensor.unbind(0)):
            if kind == "down_proj":
                yield f"{prefix}.{expert}.down_proj.weight", matrix
            else:
                gate, up = matrix.chunk(2, dim=0)
                yield f"{prefix}.{expert}.gate_proj.weight", gate
                yield f"{prefix}.{expert}.up_proj.weight", up
    else:
        yield name, tensor
