"""FSDP2's gathering of weights, and the spans of gradient reductions.

Owns the order of the units (modules that are gathered together) and FSDP2's settings for them, and a wrapper of FSDP2's
reduce-scatter, which it calls unchanged. FSDP2 calls it on its communication stream, so that on a GPU the span shows
the time of the reduction there, in parallel with the backward pass. One rank has no reductions and no spans.

The units are the untied embedding and head, every layer, and the root: the last norm, and the shared table if tied. A
forward pass ends with the root and the head and its backward pass begins with them, so they are not freed in between.
The embedding's backward pass does not read its weights.

Invariants: only the times of communication change, no result. After the last backward pass of an optimizer step
everything is sharded again, so that the next forward pass gathers the updated weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from telescope.trainer.model import PolicyModel
from telescope.trainer.timeline import Timeline


def units(policy: PolicyModel) -> Iterator[FSDPModule]:
    """Yields the modules that are gathered together, the root included."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            yield module


def set_prefetch(policy: PolicyModel, num_layers: int) -> None:
    """Gathers `num_layers` units ahead of the computing one. 0: torch's default, one in backward passes."""
    embedding = policy.causal_lm.get_input_embeddings()
    forward = [unit for unit in (embedding, *policy.layers, policy.head) if isinstance(unit, FSDPModule)]
    backward = [unit for unit in reversed(forward) if unit is not embedding]
    if isinstance(embedding, FSDPModule):
        embedding.set_unshard_in_backward(False)
    if not num_layers:
        return
    assert isinstance(policy, FSDPModule)
    policy.set_modules_to_forward_prefetch([*forward[:num_layers]])
    for place, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch([*forward[place + 1 : place + 1 + num_layers]])
    for place, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch([*backward[place + 1 : place + 1 + num_layers]])


def stay_gathered(policy: PolicyModel, stays: bool) -> None:
    """Sets whether weights stay gathered after the following backward passes."""
    for unit in units(policy):
        unit.set_reshard_after_backward(not stays, recurse=False)


def reshard_all(policy: PolicyModel) -> None:
    """Frees gathered weights, which stay after a forward pass without a backward pass."""
    for unit in units(policy):
        unit.reshard()


class TimedReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, measured while a timeline is set."""

    def __init__(self) -> None:
        super().__init__()
        self._timeline: Timeline | None = None
        self._micro_batch: int | None = None

    def measure(self, policy: nn.Module) -> None:
        """Sets this as the reduce-scatter of the model's units."""
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(self)

    @contextmanager
    def during(self, timeline: Timeline, micro_batch: int) -> Iterator[None]:
        """Records the reductions of a backward pass on `timeline`."""
        self._timeline, self._micro_batch = timeline, micro_batch
        try:
            yield
        finally:
            self._timeline = self._micro_batch = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._timeline is None:
            return super().__call__(*args, **kwargs)
        with self._timeline.span("gradient_reduction", self._micro_batch):
            return super().__call__(*args, **kwargs)
