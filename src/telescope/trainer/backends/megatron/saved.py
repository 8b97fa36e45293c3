"""Reads a Megatron checkpoint's weights by their Hugging Face names. Needs neither megatron-core nor ranks.

A checkpoint has whole tensors. The same parameter of all layers is one tensor with the layer as first dimension, and of
all experts also with the expert as second. One parameter at a time is read.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig

from telescope.errors import RunError
from telescope.trainer.backends.fsdp.torch_internals import read_index, read_part
from telescope.trainer.backends.megatron.families import (
    TRANSFORMER_ENGINE_NAMES,
    ParameterMapping,
    heads_of,
    mappings_of,
    whole_tensors,
)
from telescope.weights.plan import TensorMeta

LAYERS, EXPERTS = "decoder.layers.", "mlp.experts.local_experts."


def saved_weights(
    directory: Path, config: Mapping[str, Any]
) -> tuple[list[TensorMeta], Callable[[], Iterator[tuple[str, torch.Tensor]]]]:
    """Returns the metadata of a checkpoint's weights, and a function that reads them, both in the order of the model.

    `config` has the values of the model's config.json. Raises `RunError` for a damaged checkpoint.
    """
    hf_config = AutoConfig.for_model(**config)
    heads = heads_of(hf_config)
    index = read_index(directory)
    mappings = mappings_of(hf_config)
    metas = []
    for mapping in mappings:
        name, first = saved_location(mapping)
        entry = index.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise RunError(f"{directory} is damaged: it has no tensor {name}. Use another step")
        part = torch.empty(entry.size[len(first) :], device="meta")
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        wholes = whole_tensors(mapping.entry.kind, [part], heads, hf_config.vocab_size)
        metas += [TensorMeta(key, tuple(whole.shape), dtype) for key, whole in zip(mapping.names, wholes, strict=True)]

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for mapping in mappings:
            part = read_part(directory, index, *saved_location(mapping))
            yield from zip(
                mapping.names, whole_tensors(mapping.entry.kind, [part], heads, hf_config.vocab_size), strict=True
            )

    return metas, read


def saved_location(mapping: ParameterMapping) -> tuple[str, tuple[int, ...]]:
    """Returns the tensor that contains a parameter, and the parameter's index in its first dimensions.

    Norms have the names of Transformer Engine, which computes them together with the following layer.
    """
    name = mapping.entry.parameter
    if mapping.layer is None:
        return name, ()
    if mapping.expert is None:
        name = TRANSFORMER_ENGINE_NAMES.get(name, name)
        return LAYERS + name.removeprefix(f"{LAYERS}{{layer}}."), (mapping.layer,)
    leaf = name.removeprefix(f"{LAYERS}{{layer}}.{EXPERTS}{{expert}}.")
    return f"{LAYERS}mlp.experts.experts.{leaf}", (mapping.layer, mapping.expert)
