"""Checks a model's files without loading the model. Needs neither transformers nor torch.

`model_source` finds the files. If they are neither here nor on the hub, sizes of common models come from `model_shape`
and the report names what was not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from telescope.config import model_contents
from telescope.config.chat_template import NO_TEMPLATE, compile_template, render_problem
from telescope.config.megatron import check_architecture, check_division
from telescope.config.messages import show
from telescope.config.model_contents import FLOAT_DTYPES, SPECIAL_TOKENS
from telescope.config.model_shape import ModelShape, known_shape, uneven_heads
from telescope.config.model_source import TOKENIZER_FILES, HubUnreachableError, ModelFiles, find_files
from telescope.errors import ConfigError
from telescope.utils.text import listed

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

WEIGHT_SUFFIXES = (".safetensors", ".bin")

GENERATING_CLASSES = ("ForCausalLM", "LMHead", "ForConditionalGeneration")
"""Parts of the class names of models that generate text."""

QUANTIZATION_FIX = "Choose the model that it was quantized from, or save it dequantized, in bfloat16"


@dataclass(frozen=True)
class ModelReport:
    """Findings about the model. `unchecked`: what could not be checked and why, as a sentence."""

    source: str
    shape: ModelShape | None
    unchecked: str | None = None


def inspect_model(config: TelescopeConfig, *, ask_hub: bool = True) -> ModelReport:
    """Checks the files of `config.model`.

    Raises `ConfigError` for what is certainly wrong: no such folder or repository, no config, no tokenizer, no chat
    template, no weights, or a context that the model or the number of its heads does not allow. With `ask_hub` false
    the hub is not contacted.
    """
    try:
        return _inspect(config, find_files(config, ask_hub=ask_hub))
    except HubUnreachableError as error:
        if config.chat_template is not None:
            _check_template(config, config.chat_template, {})
        shape = known_shape(config.model)
        if shape is not None:
            _check_against_shape(config, shape)
        return ModelReport(
            "a table of well-known models" if shape else "nowhere",
            shape,
            f"tokenizer, chat template and weights of {config.model} could not be checked: there is no such folder "
            f"here, and {error}",
        )


def vocabulary_size(config: TelescopeConfig) -> int:
    """Rows of the model's output layer. Raises `ConfigError` for a model whose sizes are not known."""
    shape = inspect_model(config, ask_hub=False).shape
    if shape is None:
        raise ConfigError(
            f"filter_gibberish compares with a uniform choice over the vocabulary, but the config.json of "
            f"{config.model!r} does not name its sizes as expected. Set filter_gibberish to false"
        )
    return shape.vocab_size


def _inspect(config: TelescopeConfig, files: ModelFiles) -> ModelReport:
    data = files.read_object("config.json")
    if data is None:
        problem = "has a config.json that is no JSON object" if "config.json" in files.names else "holds no config.json"
        if base := (files.read_object("adapter_config.json") or {}).get("base_model_name_or_path"):
            problem = f"holds an adapter of {base}: merge it (merge_and_unload of peft, then save_pretrained)"
        raise ConfigError(f"model is {config.model!r}, but {files.where} {problem}. Give a model in HuggingFace format")
    _check_language_model(config, data)
    check_architecture(config, data)
    _check_quantization(config, data)
    _check_tokenizer(config, files, data)
    _check_weights(config, files)
    shape = ModelShape.from_config(data)
    if shape is not None:
        rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
        scaled = isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) != "default"
        _check_against_shape(config, shape, scaled=scaled)
    return ModelReport(files.where, shape)


def _check_language_model(config: TelescopeConfig, data: Mapping[str, Any]) -> None:
    """Refuses what certainly generates no text. `trainer.trial` judges the rest."""
    named, model_type = data.get("architectures"), data.get("model_type")
    names = map(str, named) if isinstance(named, list) else ()
    generates = any(part in name for name in names for part in GENERATING_CLASSES)
    if data.get("is_encoder_decoder") or not isinstance(model_type, str) or not (generates or data.get("auto_map")):
        raise ConfigError(
            f"model is {config.model!r}, whose config.json has model_type {show(model_type)} and architectures "
            f"{show(named)}, which is no causal language model. Choose a model that generates text token by token"
        )


def _check_quantization(config: TelescopeConfig, data: Mapping[str, Any]) -> None:
    """Refuses quantized models. The trainer computes gradients of, and sends, weights in floating point."""
    places = [place for place in (data, data.get("text_config")) if isinstance(place, Mapping)]
    for field in ("quantization_config", "compression_config"):
        quantization = next((place[field] for place in places if place.get(field) is not None), None)
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise ConfigError(
                f"model is {config.model!r}, whose config.json has a {field} ({show(method)}): quantized weights "
                f"cannot be trained. {QUANTIZATION_FIX}"
            )


def _check_tokenizer(config: TelescopeConfig, files: ModelFiles, model_config: Mapping[str, Any]) -> None:
    if not files.names & set(TOKENIZER_FILES):
        raise ConfigError(
            f"model is {config.model!r}, but {files.where} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            "Save it beside the weights: AutoTokenizer.from_pretrained(<base model>).save_pretrained(<folder>)"
        )
    template = config.chat_template or files.chat_template()
    _check_vocabulary(config, files, model_config, template or "")
    if template is None:
        raise ConfigError(
            f"model is {config.model!r}, and {files.where} (chat_template.jinja, tokenizer_config.json) {NO_TEMPLATE}"
        )
    _check_template(config, template, files.read_object("tokenizer_config.json") or {})


def _check_vocabulary(
    config: TelescopeConfig, files: ModelFiles, model_config: Mapping[str, Any], template: str
) -> None:
    """Checks tokenizer.json, if any, and that every token has an embedding."""
    if "tokenizer.json" not in files.names:
        return
    tokenizer = files.read_object("tokenizer.json") or {}
    parsed = tokenizer.get("model")
    if not isinstance(parsed, Mapping) or not parsed.get("vocab"):
        raise ConfigError(
            f"model is {config.model!r}, but tokenizer.json of {files.where} has no vocabulary. Download or save it "
            "again: AutoTokenizer.from_pretrained(<base model>).save_pretrained(<folder>)"
        )
    largest = model_contents.largest_token_id(tokenizer, files.read_object("tokenizer_config.json") or {}, template)
    text_config = model_config.get("text_config")
    size = (text_config if isinstance(text_config, Mapping) else model_config).get("vocab_size")
    if isinstance(size, int) and largest is not None and largest >= size:
        raise ConfigError(
            f"model is {config.model!r}, whose config.json has vocab_size {size}, but its tokenizer has ids up to "
            f"{largest}, for which the model has no embedding. Save the tokenizer that the model was trained with, or "
            "resize the model: model.resize_token_embeddings(len(tokenizer))"
        )


def _check_weights(config: TelescopeConfig, files: ModelFiles) -> None:
    """Checks that a model's files exist and are complete. The index lists them; their header has their length."""
    if not any(name.endswith(WEIGHT_SUFFIXES) for name in files.names) and not files.where.startswith("the hub cache"):
        raise ConfigError(
            f"model is {config.model!r}, but {files.where} holds no weights (no *.safetensors). Save the model "
            "there, or give the folder that holds it"
        )
    if (folder := files.folder) is None:
        return
    # transformers loads `model.safetensors`, else the files of the index.
    present = sorted(name for name in files.names if name.endswith(".safetensors"))
    index = files.read_object("model.safetensors.index.json") or {}
    weight_map = index.get("weight_map")
    indexed = set(map(str, weight_map.values())) if isinstance(weight_map, Mapping) else set()
    missing = sorted(indexed - set(present))
    if missing and not files.where.startswith("the hub cache"):  # what the cache lacks is downloaded
        is_old = "model.safetensors" in present
        fix = "Remove that index, which is of an earlier save" if is_old else "Download or save the model again"
        raise ConfigError(
            f"model is {config.model!r}, but {files.where} lacks {listed(missing)}, which model.safetensors.index.json "
            f"lists. {fix}"
        )
    if indexed and "model.safetensors" in set(present) - indexed:
        raise ConfigError(
            f"model is {config.model!r}, but {files.where} has both model.safetensors, which the trainer would load, "
            "and a model.safetensors.index.json of other files, which vLLM would. Remove one of the two"
        )
    loaded = {"model.safetensors"} & set(present) or indexed
    for name in present:
        try:
            found = model_contents.safetensors_tensors(folder / name)
        except (OSError, ValueError) as error:
            problem = f"it cannot be read ({error.strerror or error})" if isinstance(error, OSError) else error
            raise ConfigError(
                f"model is {config.model!r}, but {name} of {files.where} is broken: {problem}. Download or save the "
                "model again"
            ) from None
        # Buffers, such as masks, may be whole numbers.
        weights = {key: tensor.dtype for key, tensor in found.items() if name in loaded and key.endswith(".weight")}
        if quantized := [f"{key} ({dtype})" for key, dtype in weights.items() if dtype not in FLOAT_DTYPES]:
            raise ConfigError(
                f"model is {config.model!r}, but {name} of {files.where} holds {listed(quantized)}: quantized "
                f"weights cannot be trained. {QUANTIZATION_FIX}"
            )


def _check_against_shape(config: TelescopeConfig, shape: ModelShape, *, scaled: bool = False) -> None:
    longest = shape.max_position_embeddings
    if longest and config.max_model_len > longest and not scaled:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but {config.model} handles at most {longest} tokens "
            f"(max_position_embeddings). Lower max_model_len to {longest} or less"
        )
    if config.train_backend != "megatron" and (
        heads := uneven_heads(config.fsdp_context_parallel_size, shape.num_heads, shape.num_kv_heads)
    ):
        raise ConfigError(
            f"fsdp_context_parallel_size is {config.fsdp_context_parallel_size}, but {config.model} has {heads}. "
            "Choose another size"
        )
    check_division(config, shape)
    tensor_parallel = config.inference_tensor_parallel_size
    cut = {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads}
    if shape.num_dense_layers():
        cut["intermediate_size"] = shape.intermediate_size
    if shape.num_sparse_layers():
        cut["moe_intermediate_size"] = shape.expert_intermediate_size
    for name, size in cut.items():
        repeated = name == "num_key_value_heads" and tensor_parallel % size == 0
        if size % tensor_parallel and not repeated:
            raise ConfigError(
                f"inference_tensor_parallel_size is {tensor_parallel}, but {name} of {config.model} is {size}, which "
                "it must divide. Choose a divisor"
            )
    if shape.num_experts and config.weight_transfer == "background":
        raise ConfigError(
            f"weight_transfer is background, but {config.model} has experts, which take their weights in place. Set "
            "weight_transfer to auto"
        )


def _check_template(config: TelescopeConfig, template: str, tokenizer_config: Mapping[str, Any]) -> None:
    """Refuses a chat template that cannot be read, or renders no prompt."""
    what, fix = f"The chat template of {config.model!r}", "Set chat_template to a Jinja2 template that can be read"
    if config.chat_template is not None:
        what, fix = "chat_template", "Correct the template, or leave chat_template null"
    try:
        compiled = compile_template(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{what} is not a Jinja2 template: {error.message} (line {error.lineno}). {fix}") from None
    variables = {name: model_contents.token_text(tokenizer_config.get(name)) or "" for name in SPECIAL_TOKENS}
    problem = render_problem(compiled, {**variables, "enable_thinking": config.enable_thinking})
    if problem is not None:
        raise ConfigError(f"{what} {problem}. Set chat_template to a Jinja2 template that writes the conversation")
