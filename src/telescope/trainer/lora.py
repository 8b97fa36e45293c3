"""Implements LoRA adapters (arXiv:2106.09685) with peft's semantics and file format.

Owns the layers, the choice of modules to adapt, merged weights, and the files of an adapter. Does not own sharding.

An adapted layer computes `x W^T + scaling * dropout(x) A^T B^T`, with A [rank, in], B [out, rank] and
scaling = lora_alpha / lora_rank. W is frozen in `model_dtype`; A and B are float32 (float64 in a float64 model), start
as peft's do (A uniform, B zero), and are the only trained parameters.

Invariant: the names of all other parameters do not change. An adapter's names are the layer's name with
`.lora_A.weight` and `.lora_B.weight`, in peft's files after `FILE_PREFIX`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from telescope.config.lora import ALL_LINEAR, choose_layers
from telescope.errors import UserError
from telescope.trainer.hf_folder import new_folder
from telescope.trainer.model import decoder_of
from telescope.weights.model_folder import ModelOrigin, absolute_model

A, B = ".lora_A.weight", ".lora_B.weight"
FILE_PREFIX = "base_model.model."
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""The two files of an adapter in peft's format."""


class LoraLinear(nn.Linear):
    """A frozen linear layer with a trained product of two small matrices."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float, seed: int) -> None:
        # Created without storage, because the layer keeps the tensors of `base`.
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scaling = alpha / rank
        dtype = torch.float64 if base.weight.dtype == torch.float64 else torch.float32
        options: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": dtype}
        self.lora_A = nn.Linear(self.in_features, rank, **options)
        self.lora_B = nn.Linear(rank, self.out_features, **options)
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        if base.weight.device.type != "meta":
            generator = torch.Generator().manual_seed(seed)
            nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5), generator=generator)
            nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update = self.lora_B(self.lora_A(self.lora_dropout(x)))
        return F.linear(x, self.weight, self.bias) + update * self.scaling


def add_adapters(causal_lm: PreTrainedModel, config: Any) -> None:
    """Freezes the model and replaces the layers of `lora_target_modules`. Raises `UserError` for an unknown module."""
    causal_lm.requires_grad_(False)
    for number, name in enumerate(find_targets(causal_lm, config.lora_target_modules)):
        parent, _, child = name.rpartition(".")
        base = causal_lm.get_submodule(name)
        assert isinstance(base, nn.Linear)
        # Layers of one shape should not start with the same A.
        adapted = LoraLinear(base, config.lora_rank, config.lora_alpha, config.lora_dropout, config.seed + number)
        setattr(causal_lm.get_submodule(parent), child, adapted)


def find_targets(causal_lm: PreTrainedModel, targets: str | list[str]) -> list[str]:
    """Returns the names of the layers to adapt. Raises the `UserError` of `choose_layers`."""
    output = causal_lm.get_output_embeddings()
    own = {*decoder_of(causal_lm).modules(), output}  # text does not train the towers of a wrapper
    modules = {name: module for name, module in causal_lm.named_modules() if name and module in own}
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not output]
    if not linear:
        raise UserError("lora_rank is set, but the model has no linear layers that an adapter could be added to")
    return choose_layers(targets, linear, set(modules) - set(linear))


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Returns the adapted layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def is_adapter(name: str) -> bool:
    """Returns whether a parameter belongs to an adapter."""
    return name.endswith((A, B))


def set_dropout(model: nn.Module, active: bool) -> None:
    """Switches dropout of the adapters on or off."""
    for layer in adapted_layers(model).values():
        layer.lora_dropout.train(active)


def merged(
    weight_OI: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scaling: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Computes W + scaling * B A in the adapter's dtype, then casts. Also works on a range of rows of W and B."""
    product_OI = (b_OR @ a_RI).mul_(scaling)
    return product_OI.add_(weight_OI).to(dtype or weight_OI.dtype)


# --- files ----------------------------------------------------------------------------------------------------------


def config_of_adapter(names: Iterable[str], config: Any) -> dict[str, Any]:
    """Returns the `adapter_config.json` of an adapter. `names` are its parameters in a model or a file."""
    targets = config.lora_target_modules
    if targets == ALL_LINEAR:  # listed, as peft does: a reader may count other layers as linear
        targets = sorted({name.removesuffix(A).rpartition(".")[2] for name in names if name.endswith(A)})
    alpha = config.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": absolute_model(config.model),
        "r": config.lora_rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }


def adapter_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns an adapter's parameters, which have one dtype, on the CPU by their file names.

    They leave the device together: hundreds of copies would each wait for it, and for the engine if that shares it.
    """
    tensors = {FILE_PREFIX + name: tensor for name, tensor in named}
    together = torch.cat([tensor.reshape(-1) for tensor in tensors.values()]).cpu()
    parts = together.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(tensors.items(), parts, strict=True)}


def write_adapter(
    directory: Path, tensors: Mapping[str, torch.Tensor], config: dict[str, Any], origin: ModelOrigin | None = None
) -> int:
    """Writes an adapter, with its `origin` as `write_origin` does. Returns the bytes of the weights.

    The folder appears when it is complete, and replaces a folder of the same name. Raises `OSError`.
    """
    with new_folder(directory, origin) as unfinished:
        # `save_file` creates files with mode 0600, which other users' servers cannot read.
        size = (unfinished / WEIGHTS_FILE).write_bytes(save(dict(tensors), metadata={"format": "pt"}))
        (unfinished / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return size
