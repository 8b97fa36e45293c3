"""Loads a Hugging Face checkpoint into a Megatron stage, and yields the checkpoint's tensors from all stages.

Invariants: each rank reads only its part of a file. Every rank yields every tensor, in the order of `places_of`;
besides the yielded tensors at most one bucket is in memory, once for each rank of the group that gathers it. Names and
shapes follow from the tables (`families`), so ranks exchange nothing but numbers.
"""

from __future__ import annotations

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
    Place,
    local_part,
    whole_tensors,
)
from telescope.trainer.backends.megatron.parallel import Parallel

Shapes = Mapping[str, torch.Size]
"""Shapes of the checkpoint's tensors by name."""


@dataclass(slots=True, frozen=True)
class Stages:
    """What each pipeline stage and each expert-parallel rank has of a model."""

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

    def stage_of(self, place: Place) -> int:
        """Returns the stage that has a parameter."""
        if place.layer is None:
            return 0 if place.entry is EMBEDDING else self.num_stages - 1
        return place.layer // self.layers_per_stage

    def parameter(self, place: Place) -> str:
        """Returns the name of a parameter in its stage, on its rank."""
        first_expert = (place.expert or 0) // self.experts_per_rank * self.experts_per_rank if self.num_experts else 0
        return place.parameter((place.layer or 0) // self.layers_per_stage * self.layers_per_stage, first_expert)


@torch.no_grad()
def load(
    stage: nn.Module, folder: Path, places: Sequence[Place], stages: Stages, parallel: Parallel, heads: Heads
) -> None:
    """Fills this rank's stage from the files in `folder`. Raises `UserError` for tensors that it lacks."""
    parameters = dict(stage.named_parameters())
    own = [place for place in places if stages.stage_of(place) == parallel.pp.rank()]
    tied_output = FINAL[-1].parameter
    if tied_output in parameters and places[-1].entry is not FINAL[-1]:
        own.append(Place(Entry(tied_output, EMBEDDING.tensors, "vocabulary")))  # the last stage's copy of a tied table
    experts = range(parallel.ep.rank() * stages.experts_per_rank, (parallel.ep.rank() + 1) * stages.experts_per_rank)
    tp = parallel.tp
    with ExitStack() as stack:
        files = _open_files(folder, stack)
        for place in own:
            if place.expert is not None and place.expert not in experts:
                continue
            if missing := [name for name in place.names if name not in files]:
                raise UserError(f"model: {folder} lacks the tensor {missing[0]}. Download or save the model again")
            tensors = [files[name].get_slice(name) for name in place.names]
            rank, size = (0, 1) if place.expert is not None else (tp.rank(), tp.size())
            parameter = parameters.pop(stages.parameter(place))
            part = local_part(place.entry.kind, tensors, heads, rank, size)
            if part.shape != parameter.shape:
                raise UserError(
                    f"model: {', '.join(place.names)} in {folder} have a part of {list(part.shape)} instead of "
                    f"{list(parameter.shape)}. Correct config.json, or save the model again"
                )
            parameter.copy_(part)
            if not parameter.isfinite().all():
                raise UserError(
                    f"model: {', '.join(place.names)} in {folder} are NaN or infinite in {parameter.dtype}. Save the "
                    "model again, or choose a dtype with a wider range"
                )
    assert not parameters, f"parameters without a place: {sorted(parameters)}"


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

    places: list[Place]
    shape: torch.Size
    """Of one rank's part of one parameter."""
    num_local: int
    """Parameters on each rank: some of the experts, otherwise 1."""

    @property
    def is_expert(self) -> bool:
        return self.places[0].expert is not None

    @property
    def numel(self) -> int:
        return self.num_local * self.shape.numel()


@torch.no_grad()
def export(
    parameters: Mapping[str, torch.Tensor],
    places: Sequence[Place],
    stages: Stages,
    parallel: Parallel,
    heads: Heads,
    shapes: Shapes,
    dtype: torch.dtype,
    *,
    bucket_bytes: int = GROUP_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor) of the whole model in `dtype`. Collective.

    `parameters` are those of this rank's stage, or tensors of their shapes, such as their gradients.
    """
    device = next(iter(parameters.values())).device
    limit = bucket_bytes // dtype.itemsize
    for stage_number, is_expert, units in _buckets(places, stages, parallel, heads, shapes, limit):
        sizes = [unit.numel for unit in units]
        own = torch.empty(sum(sizes), dtype=dtype, device=device)
        if stage_number == parallel.pp.rank():
            first = parallel.ep.rank() * stages.experts_per_rank if is_expert else 0
            for unit, part in zip(units, own.split(sizes), strict=True):
                local = unit.places[first : first + unit.num_local]
                for place, values in zip(local, part.view(unit.num_local, *unit.shape), strict=True):
                    values.copy_(parameters[stages.parameter(place)])
        if parallel.pp.size() > 1:
            dist.broadcast(own, dist.get_global_rank(parallel.pp, stage_number), group=parallel.pp)
        group = parallel.ep if is_expert else parallel.tp
        by_rank = _gather(own, group)
        offset = 0
        for unit in units:
            parts = by_rank[:, offset : offset + unit.numel].view(group.size(), unit.num_local, *unit.shape)
            offset += unit.numel
            # Experts are whole on their ranks; everything else is a part of each rank.
            wholes = [[expert] for expert in parts.flatten(0, 1)] if is_expert else [list(parts[:, 0])]
            for place, ranks in zip(unit.places, wholes, strict=True):
                vocab_size = shapes[place.names[0]][0]
                yield from zip(place.names, whole_tensors(place.entry.kind, ranks, heads, vocab_size), strict=True)


def _buckets(
    places: Sequence[Place], stages: Stages, parallel: Parallel, heads: Heads, shapes: Shapes, limit: int
) -> Iterator[tuple[int, bool, list[_Unit]]]:
    """Yields (stage, whether of experts, units) with at most `limit` numbers in all ranks' parts, or one unit."""

    def unit_of(places: list[Place]) -> _Unit:
        is_expert = places[0].expert is not None
        size = 1 if is_expert else parallel.tp.size()
        metas = [torch.empty(shapes[name], device="meta") for name in places[0].names]
        shape = local_part(places[0].entry.kind, metas, heads, 0, size).shape
        return _Unit(places, shape, stages.experts_per_rank if is_expert else 1)

    same = itertools.groupby(places, key=lambda place: (place.layer, place.entry.parameter))
    units = (unit_of(list(group)) for _, group in same)
    for (stage, is_expert), group in itertools.groupby(
        units, key=lambda unit: (stages.stage_of(unit.places[0]), unit.is_expert)
    ):
        bucket: list[_Unit] = []
        room = limit
        for unit in group:
            size = unit.numel * (parallel.ep.size() if is_expert else parallel.tp.size())
            if bucket and size > room:
                yield stage, is_expert, bucket
                bucket, room = [], limit
            bucket.append(unit)
            room -= size
        yield stage, is_expert, bucket


def _gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the numbers of all ranks, [ranks, numbers]."""
    if group.size() == 1:
        return own[None]
    received = torch.empty(group.size(), len(own), dtype=own.dtype, device=own.device)
    # As bytes, which every backend can gather.
    all_gather(received.view(-1).view(torch.uint8), own.view(torch.uint8), group)
    return received
