"""Converts weights between Hugging Face checkpoints and Megatron's stages.

Loads a checkpoint into a stage, and yields the checkpoint's tensors from all stages.

Invariants: each rank reads only its part of a file. Every rank yields every tensor, in the order of `mappings_of`. In
addition to the yielded tensors, at most one bucket is in memory, once for each rank of the group that gathers it. Names
and shapes follow from the tables (`families`), so ranks only exchange numbers.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from telescope.errors import UserError
from telescope.trainer.backends.fsdp.sharding import GROUP_BYTES, all_gather
from telescope.trainer.backends.megatron.families import (
    EMBEDDING,
    FINAL,
    Entry,
    ParameterMapping,
    heads_of,
    local_part,
    whole_tensors,
)
from telescope.trainer.backends.megatron.parallel import Parallel
from telescope.utils.data import split_by_size
from telescope.weights.model_folder import open_tensors

Unit = tuple[list[ParameterMapping], torch.Size]
"""A parameter, or the same parameter of all experts of a layer, and the shape of what a rank has of it: the number of
parameters (some of the experts, otherwise 1) by the shape of its part of one."""


class Conversion:
    """Converts the weights of a model, which `parallel` divides. `shapes` are the checkpoint's, by name."""

    def __init__(
        self, hf_config: Any, mappings: Sequence[ParameterMapping], shapes: Mapping[str, torch.Size], parallel: Parallel
    ) -> None:
        self.mappings, self.shapes, self.parallel = mappings, shapes, parallel
        self.heads = heads_of(hf_config)
        self.layers_per_stage = hf_config.num_hidden_layers // parallel.pp.size()
        self.experts_per_rank = (getattr(hf_config, "num_experts", None) or 0) // parallel.ep.size()

    @torch.no_grad()
    def load(self, stage: nn.Module, folder: Path) -> None:
        """Fills this rank's stage from the files in `folder`. Raises `UserError` for missing tensors."""
        parameters, tp = dict(stage.named_parameters()), self.parallel.tp
        own = [mapping for mapping in self.mappings if self._stage_of(mapping) == self.parallel.pp.rank()]
        tied_output = FINAL[-1].parameter
        if tied_output in parameters and self.mappings[-1].entry is not FINAL[-1]:
            # The last stage's copy of a tied table.
            own.append(ParameterMapping(Entry(tied_output, EMBEDDING.tensors, "vocabulary")))
        first_expert = self.parallel.ep.rank() * self.experts_per_rank
        experts = range(first_expert, first_expert + self.experts_per_rank)
        files = open_tensors(folder)
        for mapping in own:
            if mapping.expert is not None and mapping.expert not in experts:
                continue
            if missing := [name for name in mapping.names if name not in files]:
                raise UserError(f"model: {folder} lacks the tensor {missing[0]}. Download or save the model again")
            tensors = [files[name].get_slice(name) for name in mapping.names]
            rank, size = (0, 1) if mapping.expert is not None else (tp.rank(), tp.size())
            parameter = parameters.pop(self._parameter(mapping))
            part = local_part(mapping.entry.kind, tensors, self.heads, rank, size)
            if part.shape != parameter.shape:
                raise UserError(
                    f"model: {', '.join(mapping.names)} in {folder} have a part of {list(part.shape)} instead of "
                    f"{list(parameter.shape)}. Correct config.json, or save the model again"
                )
            parameter.copy_(part)
            if not parameter.isfinite().all():
                raise UserError(
                    f"model: {', '.join(mapping.names)} in {folder} are NaN or infinite in {parameter.dtype}. Save the "
                    "model again, or choose a dtype with a wider range"
                )
        assert not parameters, f"parameters without a mapping: {sorted(parameters)}"

    @torch.no_grad()
    def export(self, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, full tensor) of the whole model in `dtype`. Collective.

        `parameters` are the parameters of this rank's stage, or tensors with the same shapes, such as gradients.
        """
        device, parallel = next(iter(parameters.values())).device, self.parallel
        for stage_number, is_expert, units in self._buckets(GROUP_BYTES // dtype.itemsize):
            sizes = [shape.numel() for _, shape in units]
            own = torch.empty(sum(sizes), dtype=dtype, device=device)
            if stage_number == parallel.pp.rank():
                first = parallel.ep.rank() * self.experts_per_rank if is_expert else 0
                for (mappings, shape), part in zip(units, own.split(sizes), strict=True):
                    for mapping, values in zip(mappings[first : first + shape[0]], part.view(shape), strict=True):
                        values.copy_(parameters[self._parameter(mapping)])
            if parallel.pp.size() > 1:
                dist.broadcast(own, dist.get_global_rank(parallel.pp, stage_number), group=parallel.pp)
            group = parallel.ep if is_expert else parallel.tp
            by_rank = own[None]
            if group.size() > 1:
                by_rank = torch.empty(group.size(), len(own), dtype=dtype, device=device)
                all_gather(by_rank, own, group)
            for (mappings, shape), columns in zip(units, by_rank.split(sizes, dim=1), strict=True):
                parts = columns.view(group.size(), *shape)
                # Experts are whole on their ranks. Of all other parameters, each rank has a part.
                wholes = [[expert] for expert in parts.flatten(0, 1)] if is_expert else [list(parts[:, 0])]
                for mapping, ranks in zip(mappings, wholes, strict=True):
                    vocab_size = self.shapes[mapping.names[0]][0]
                    tensors = whole_tensors(mapping.entry.kind, ranks, self.heads, vocab_size)
                    yield from zip(mapping.names, tensors, strict=True)

    def _buckets(self, limit: int) -> Iterator[tuple[int, bool, list[Unit]]]:
        """Yields (stage, is of experts, units) with at most `limit` numbers on all ranks together, or with one unit."""
        same = itertools.groupby(self.mappings, key=lambda mapping: (mapping.layer, mapping.entry.parameter))
        units = (self._unit_of(list(group)) for _, group in same)
        for (stage, is_expert), group in itertools.groupby(
            units, key=lambda unit: (self._stage_of(unit[0][0]), unit[0][0].expert is not None)
        ):
            num_ranks = self.parallel.ep.size() if is_expert else self.parallel.tp.size()
            for bucket in split_by_size(group, lambda unit: unit[1].numel(), limit // num_ranks):
                yield stage, is_expert, bucket

    def _unit_of(self, mappings: list[ParameterMapping]) -> Unit:
        is_expert = mappings[0].expert is not None
        metas = [torch.empty(self.shapes[name], device="meta") for name in mappings[0].names]
        size = 1 if is_expert else self.parallel.tp.size()
        shape = local_part(mappings[0].entry.kind, metas, self.heads, 0, size).shape
        return mappings, torch.Size((self.experts_per_rank if is_expert else 1, *shape))

    def _stage_of(self, mapping: ParameterMapping) -> int:
        """Returns the stage that has a parameter."""
        if mapping.layer is None:
            return 0 if mapping.entry is EMBEDDING else self.parallel.pp.size() - 1
        return mapping.layer // self.layers_per_stage

    def _parameter(self, mapping: ParameterMapping) -> str:
        """Returns the name of a parameter in its stage, on its rank."""
        layer, expert = (mapping.layer or 0) % self.layers_per_stage, mapping.expert
        return mapping.entry.parameter.format(layer=layer, expert=expert and expert % self.experts_per_rank)
