"""Builds the policy, a transformers model that returns logprobs instead of logits.

Owns loading and the changes of the loaded model: packed attention, the output layer, no dropout, frozen towers for
images and sound. Does not own sharding. Invariant: without `PREFIX`, parameters have their names in transformers.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from telescope.errors import UserError
from telescope.trainer.attention import ATTENTION_NAME, register_attention
from telescope.trainer.checkpoint_names import CheckpointNames
from telescope.trainer.logprob import LogprobHead
from telescope.trainer.model_input import ModelInput
from telescope.utils.text import listed, single_line
from telescope.utils.timeline import Timeline

PREFIX = "causal_lm."

LOGIT_FACTORS = ("logit_scale", "lm_head_multiplier")
LOGIT_DIVISOR = "logits_scaling"
LOGIT_SOFTCAP = "final_logit_softcapping"
"""Fields of configs with which some architectures change the logits after the output layer."""


TABLES: tuple[tuple[Any, Any], ...] = (
    (MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.AutoModelForImageTextToText),
)
"""Models by config, and the classes that load them, for text alone and with other media."""


def compute_dtype(config: Any) -> torch.dtype:
    """Returns the dtype of activations and of gathered weights."""
    return getattr(torch, config.mixed_precision_dtype or config.model_dtype)


@dataclass(frozen=True, slots=True)
class Execution:
    """How a model computes several samples at once.

    Packed samples follow each other in a row, and `attention` (a name in transformers) separates them. Otherwise each
    sample has its own row, padded on the right, where causal layers of any kind are exact.
    """

    attention: str = ATTENTION_NAME
    packs: bool = True


PACKED = Execution()


class PolicyModel(nn.Module):
    """Maps the samples of a micro-batch to logprob and entropy of chosen tokens."""

    def __init__(self, causal_lm: transformers.PreTrainedModel, chunk_size: int, *, packs: bool = True) -> None:
        super().__init__()
        output = causal_lm.get_output_embeddings()
        text = causal_lm.config.get_text_config()
        scale = 1.0 / (getattr(text, LOGIT_DIVISOR, None) or 1.0)
        for name in LOGIT_FACTORS:
            scale *= getattr(text, name, None) or 1.0
        self.checkpoint_names = CheckpointNames(causal_lm)
        head = LogprobHead(
            output.weight, getattr(output, "bias", None), chunk_size, scale, getattr(text, LOGIT_SOFTCAP, None)
        )
        causal_lm.set_output_embeddings(head)
        self.causal_lm: transformers.PreTrainedModel = causal_lm
        self.packs = packs
        own = set(self.decoder.parameters())
        for parameter in causal_lm.base_model.parameters():
            if parameter not in own:  # of a tower for other media, which text does not train
                parameter.requires_grad_(False)
        # Dropout would make the trainer's logprobs differ from the engine's.
        self.eval()

    @property
    def decoder(self) -> nn.Module:
        """The transformer without its output layer."""
        return decoder_of(self.causal_lm)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's blocks, in order."""
        lists = [list(module) for module in self.decoder.children() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len)

    @property
    def head(self) -> LogprobHead:
        """The output layer."""
        return self.causal_lm.get_output_embeddings()

    @property
    def head_dim(self) -> int:
        """The size of the largest attention head."""
        config = self.causal_lm.config.get_text_config()
        sizes = [
            getattr(module, name, None) for module in self.decoder.modules() for name in ("head_dim", "qk_head_dim")
        ]
        known = [size for size in sizes if isinstance(size, int)]
        return max(known, default=config.hidden_size // config.num_attention_heads)

    @property
    def has_plain_attention(self) -> bool:
        """Returns whether attention is a softmax of scores without a bound and without sinks."""
        config = self.causal_lm.config.get_text_config()
        has_sinks = any(hasattr(module, "sinks") for module in self.decoder.modules())
        return getattr(config, "attn_logit_softcapping", None) is None and not has_sinks

    def forward(
        self, row: ModelInput, temperature: float, timeline: Timeline, micro_batch: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes logprob and entropy, each [N], of the row's predicted tokens."""
        layout = {} if row.layout is None else {"packed_layout": row.layout}
        with timeline.span("forward", micro_batch):
            hidden_STD = self.decoder(
                input_ids=row.token_ids_ST, position_ids=row.position_ids_ST, use_cache=False, **layout
            ).last_hidden_state
        with timeline.span("compute_entropy", micro_batch):
            predicting_ND = hidden_STD.flatten(0, 1).index_select(0, row.predicting_N)
            return self.head(predicting_ND, row.target_N, temperature)


def load_config(model: str, *, trust_remote_code: bool = False, local: bool = False) -> transformers.PretrainedConfig:
    """Loads the config of a causal language model for training. Raises `UserError` for anything else.

    With `local`, reads it from this machine, even if the hub has a newer one.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(
            model, trust_remote_code=trust_remote_code, local_files_only=local
        )
    except Exception as error:  # transformers raises many classes for invalid values
        fix = "Correct config.json, or choose a model of a family in docs/models.md"
        raise UserError(f"model: {model!r} cannot be loaded: {reason(error)}. {fix}") from error
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # only needed for a loss that balances experts
    architecture = next((known for known, _ in _classes(config)), None)
    if isinstance(architecture, type):
        named = list(config.architectures or ())
        if architecture.__name__ not in named:  # such as an encoder
            raise UserError(
                f"model: {model!r} has architectures {named} in config.json instead of {architecture.__name__}, so "
                "that vLLM does not load it as a language model. Choose a model that generates text, or correct "
                "config.json"
            )
    elif not hasattr(config, "auto_map"):  # no code that comes with the model
        raise UserError(f"model: {model!r} is of type {config.model_type}, which is no causal language model")
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(part, name, 0.0)
    return config


def load_causal_lm(
    model: str,
    dtype: torch.dtype,
    *,
    with_weights: bool,
    trust_remote_code: bool = False,
    attention: str = ATTENTION_NAME,
) -> transformers.PreTrainedModel:
    """Loads a model from a path or hub id: with weights on the CPU, without weights on the meta device.

    `attention` is the name of its implementation in transformers. Raises `UserError` if there is no such model, or if
    its files do not fit its config.
    """
    register_attention()
    config = load_config(model, trust_remote_code=trust_remote_code)
    options = {"trust_remote_code": trust_remote_code, "attn_implementation": attention, "dtype": dtype}
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # torch's grouped product of experts does not support float64
    if with_weights:
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        found: Any = auto_class(config).from_pretrained(model, config=config, **options)
        causal_lm, loaded = found
        refuse_incomplete(model, loaded)
        with torch.device("meta"):
            described = auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
        if is_tied(described) and not is_tied(causal_lm):
            raise UserError(
                f"model: {model!r}: config.json has tie_word_embeddings true, but the output layer in the weight files "
                "differs from the embedding. Set tie_word_embeddings to false in config.json"
            )
        return causal_lm
    with torch.device("meta"):
        return auto_class(config).from_config(config, **options)


def check_weight_files(model: str, *, trust_remote_code: bool = False) -> None:
    """Compares headers of weight files with the architecture. Raises `UserError` for files that do not fit."""
    config = load_config(model, trust_remote_code=trust_remote_code, local=True)
    try:
        _, loaded = auto_class(config).from_pretrained(
            model, config=config, trust_remote_code=trust_remote_code, local_files_only=True, device_map="meta",
            attn_implementation="eager", output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except Exception as error:  # from a damaged file to a size of 0
        raise UserError(
            f"model: {model!r}: config.json and weight files do not fit: {reason(error)}. Download or save the model "
            "again, or correct config.json"
        ) from error
    refuse_incomplete(model, loaded)


def auto_class(config: transformers.PretrainedConfig) -> Any:
    """Returns the transformers class that loads a model with this config, for text and perhaps other media."""
    return next((auto for _, auto in _classes(config)), transformers.AutoModelForCausalLM)


def _classes(config: transformers.PretrainedConfig) -> list[tuple[Any, Any]]:
    """Returns the model's classes with their loaders. The class that config.json names comes first.

    Empty for code that comes with the model, and for other tasks.
    """
    found = [(table[type(config)], auto) for table, auto in TABLES if type(config) in table]
    return sorted(found, key=lambda pair: getattr(pair[0], "__name__", "") not in (config.architectures or ()))


def reason(error: Exception) -> str:
    """Returns the text of a transformers error in one line. Some errors begin with a line of little use."""
    return single_line(" ".join(f"{type(error).__name__}: {error}".split()))


def skeleton_of(config: dict[str, Any]) -> transformers.PreTrainedModel | None:
    """Builds the model of a parsed config.json on the meta device. Returns None for code that comes with the model."""
    if config.get("model_type") not in transformers.CONFIG_MAPPING:
        return None
    known = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        return auto_class(known).from_config(known)


def decoder_of(causal_lm: transformers.PreTrainedModel) -> nn.Module:
    """Returns a model's transformer without output layer and towers for other media."""
    found: nn.Module = causal_lm.get_decoder()
    return causal_lm.base_model if found is causal_lm else found


def is_tied(causal_lm: transformers.PreTrainedModel) -> bool:
    """Returns whether the output layer's weight is the embedding's."""
    return causal_lm.get_output_embeddings().weight is causal_lm.get_input_embeddings().weight


def refuse_incomplete(model: str, loaded: Mapping[str, Any]) -> None:
    """Raises `UserError` for randomly initialized tensors and unused weights after loading."""
    problems = []
    for kind, what in (
        ("missing_keys", "its weight files lack tensors"),
        ("mismatched_keys", "tensors in its weight files have other sizes than in config.json"),
        ("unexpected_keys", "its weight files hold tensors that the architecture does not have"),
    ):
        keys = loaded.get(kind) or ()  # of mismatches with both shapes
        names = [k if isinstance(k, str) else f"{k[0]} with {list(k[1])} instead of {list(k[2])}" for k in keys]
        if names:
            problems.append(f"{what}: {listed(sorted(names))}")
    if problems:
        raise UserError(
            f"model: {model!r} cannot be trained, because {'; '.join(problems)}. Download or save the model again, or "
            "correct config.json"
        )
