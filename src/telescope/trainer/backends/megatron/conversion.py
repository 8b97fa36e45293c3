"""Converts weights between Hugging Face checkpoints and Megatron's stages.

Loads a checkpoint into a stage, and yields the checkpoint's tensors from all stages.

Invariants: each rank reads only its part of a file. Every rank yields every tensor, in the order of `mappings_of`. In
addition to the yielded tensors, at most one bucket is in memory, once for each rank of the group that gathers it. Names
and shapes follow from the tables (`families`), so ranks only exchange numbers.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from telescope.errors import UserError
from telescope.trainer.backends.fsdp.sharding import GROUP_BYTES, all_gather
from telescope.trainer.backends.megatron.families import (
    EMBEDDING,
    FINAL,
    Entry,
    Heads,
    ParameterMapping,
    local_part,
    whole_tensors,
)
from telescope.trainer.backends.megatron.parallel import Parallel
from telescope.utils.data import split_by_size

Shapes = Mapping[str, torch.Size]
"""Shapes of the checkpoint's tensors by name."""


@dataclass(slots=True, frozen=True)
class Division:
    """The division of a model over pipeline stages and expert-parallel ranks."""

    num_layers: int
    num_experts: int
    num_stages: int
    expert_ranks: int

    @property
    def layers_per_stage(self) -> int:
        return self.num_layers // self.num_stages

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.expert_ranks

    def stage_of(self, mapping: ParameterMapping) -> int:
        """Returns the stage that has a parameter."""
        if mapping.layer is None:
            return 0 if mapping.entry is EMBEDDING else self.num_stages - 1
        return mapping.layer // self.layers_per_stage

    def parameter(self, mapping: ParameterMapping) -> str:
        """Returns the name of a parameter in its stage, on its rank."""
        first_expert = (mapping.expert or 0) // self.experts_per_rank * self.experts_per_rank if self.num_experts else 0
        return mapping.parameter((mapping.layer or 0) // self.layers_per_stage * self.layers_per_stage, first_expert)


@torch.no_grad()
def load(
    stage: nn.Module,
    folder: Path,
    mappings: Sequence[ParameterMapping],
    division: Division,
    parallel: Parallel,
    heads: Heads,
) -> None:
    """Fills this rank's stage from the files in `folder`. Raises `UserError` for missing tensors."""
    parameters = dict(stage.named_parameters())
    own = [mapping for mapping in mappings if division.stage_of(mapping) == parallel.pp.rank()]
    tied_output = FINAL[-1].parameter
    if tied_output in parameters and mappings[-1].entry is not FINAL[-1]:
        # The last stage's copy of a tied table.
        own.append(ParameterMapping(Entry(tied_output, EMBEDDING.tensors, "vocabulary")))
    first_expert = parallel.ep.rank() * division.experts_per_rank
    experts = range(first_expert, first_expert + division.experts_per_rank)
    tp = parallel.tp
    with ExitStack() as stack:
        files = _open_files(folder, stack)
        for mapping in own:
            if mapping.expert is not None and mapping.expert not in experts:
                continue
            if missing := [name for name in mapping.names if name not in files]:
                raise UserError(f"model: {folder} lacks the tensor {missing[0]}. Download or save the model again")
            tensors = [files[name].get_slice(name) for name in mapping.names]
            rank, size = (0, 1) if mapping.expert is not None else (tp.rank(), tp.size())
            parameter = parameters.pop(division.parameter(mapping))
            part = local_part(mapping.entry.kind, tensors, heads, rank, size)
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


def _open_files(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Returns the open file of each tensor in a folder."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"model: {folder} has no safetensors files, which train_backend megatron reads")
    try:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
    except SafetensorError as error:
        raise UserError(f"model: weights in {folder} cannot be read: {error}. Save the model again") from error
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118  # no mapping


@dataclass(slots=True)
class _Unit:
    """A parameter, or the same parameter of all experts of a layer."""

    mappings: list[ParameterMapping]
    shape: torch.Size
    """Shape of one rank's part of one parameter."""
    num_local: int
    """Number of parameters on each rank: some of the experts, otherwise 1."""

    @property
    def is_expert(self) -> bool:
        return self.mappings[0].expert is not None

    @property
    def numel(self) -> int:
        return self.num_local * self.shape.numel()


@torch.no_grad()
def export(
    parameters: Mapping[str, torch.Tensor],
    mappings: Sequence[ParameterMapping],
    division: Division,
    parallel: Parallel,
    heads: Heads,
    shapes: Shapes,
    dtype: torch.dtype,
    *,
    bucket_bytes: int = GROUP_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor) of the whole model in `dtype`. Collective.

    `parameters` are the parameters of this rank's stage, or tensors with the same shapes, such as gradients.
    """
    device = next(iter(parameters.values())).device
    limit = bucket_bytes // dtype.itemsize
    for stage_number, is_expert, units in _buckets(mappings, division, parallel, heads, shapes, limit):
        sizes = [unit.numel for unit in units]
        own = torch.empty(sum(sizes), dtype=dtype, device=device)
        if stage_number == parallel.pp.rank():
            first = parallel.ep.rank() * division.experts_per_rank if is_expert else 0
            for unit, part in zip(units, own.split(sizes), strict=True):
                local = unit.mappings[first : first + unit.num_local]
                for mapping, values in zip(local, part.view(unit.num_local, *unit.shape), strict=True):
                    values.copy_(parameters[division.parameter(mapping)])
        if parallel.pp.size() > 1:
            dist.broadcast(own, dist.get_global_rank(parallel.pp, stage_number), group=parallel.pp)
        group = parallel.ep if is_expert else parallel.tp
        by_rank = _gather(own, group)
        offset = 0
        for unit in units:
            parts = by_rank[:, offset : offset + unit.numel].view(group.size(), unit.num_local, *unit.shape)
            offset += unit.numel
            # Experts are whole on their ranks. Of all other parameters, each rank has a part.
            wholes = [[expert] for expert in parts.flatten(0, 1)] if is_expert else [list(parts[:, 0])]
            for mapping, ranks in zip(unit.mappings, wholes, strict=True):
                vocab_size = shapes[mapping.names[0]][0]
                yield from zip(mapping.names, whole_tensors(mapping.entry.kind, ranks, heads, vocab_size), strict=True)


def _buckets(
    mappings: Sequence[ParameterMapping],
    division: Division,
    parallel: Parallel,
    heads: Heads,
    shapes: Shapes,
    limit: int,
) -> Iterator[tuple[int, bool, list[_Unit]]]:
    """Yields (stage, is of experts, units) with at most `limit` numbers on all ranks together, or with one unit."""

    def unit_of(mappings: list[ParameterMapping]) -> _Unit:
        is_expert = mappings[0].expert is not None
        size = 1 if is_expert else parallel.tp.size()
        metas = [torch.empty(shapes[name], device="meta") for name in mappings[0].names]
        shape = local_part(mappings[0].entry.kind, metas, heads, 0, size).shape
        return _Unit(mappings, shape, division.experts_per_rank if is_expert else 1)

    same = itertools.groupby(mappings, key=lambda mapping: (mapping.layer, mapping.entry.parameter))
    units = (unit_of(list(group)) for _, group in same)
    for (stage, is_expert), group in itertools.groupby(
        units, key=lambda unit: (division.stage_of(unit.mappings[0]), unit.is_expert)
    ):
        num_ranks = parallel.ep.size() if is_expert else parallel.tp.size()
        for bucket in split_by_size(group, lambda unit: unit.numel, limit // num_ranks):
            yield stage, is_expert, bucket


def _gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers the numbers of all ranks, [ranks, numbers]."""
    if group.size() == 1:
        return own[None]
    received = torch.empty(group.size(), len(own), dtype=own.dtype, device=own.device)
    all_gather(received, own, group)
    return received
