"""Experts under the names of a checkpoint: transformers keeps those of a layer in two tensors, files do not.

transformers holds `mlp.experts.gate_up_proj` [experts, 2 x inner, hidden] (gate rows above up rows) and
`mlp.experts.down_proj` [experts, hidden, inner]. The released files of Qwen3-MoE, and what vLLM loads in every version,
are three matrices an expert. Owns that translation (pure views, no copy), and what else is different with experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

GATE_UP = ".mlp.experts.gate_up_proj"
DOWN = ".mlp.experts.down_proj"


def can_be_compiled(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether blocks of this model can be compiled when they compute in `dtype`.

    The product of all experts can in bfloat16 alone; in other dtypes transformers takes one whose backward pass is
    Python, and compiling fails block by block before it falls back.
    """
    return dtype == torch.bfloat16 or not any(name.endswith(GATE_UP) for name, _ in model.named_parameters())


def checkpoint_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what a checkpoint holds in place of the parameter `name`; most are the same there.

    Works on meta tensors, which say the shapes.
    """
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
