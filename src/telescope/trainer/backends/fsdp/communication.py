"""When sharded weights are gathered, how far ahead, and how long they stay.

Owns the order of the units (what is gathered together) and what FSDP2 is told about it. Invariants: nothing here
changes a number, only when weights move; after the last backward pass of an optimizer step everything is sharded again,
so that the next forward pass gathers the updated weights.

The units are the embedding and the head, each by itself where they are untied, every layer, and the root: the last
norm, and the shared table where they are tied. The root and the head are what a forward pass ends and its backward pass
begins with, so they are not dropped in between. The embedding's backward pass does not read its weights.

When gradients are reduced over the ranks: a span for each reduce-scatter that FSDP2 runs during a backward pass.

Owns the wrapper around FSDP2's own reduce-scatter, which it calls unchanged. FSDP2 calls it with its communication
stream current, so that on a GPU the span shows when the reduction ran there, beside the backward pass and not inside
it. With one rank there is nothing to reduce, and no span.
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
    """What is gathered together, the root included."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            yield module


def set_prefetch(policy: PolicyModel, num_layers: int) -> None:
    """Gather `num_layers` units ahead of the one that computes. 0: as torch does by itself, one in backward passes."""
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
    """Whether weights stay gathered after the backward passes that follow."""
    for unit in units(policy):
        unit.set_reshard_after_backward(not stays, recurse=False)


def reshard_all(policy: PolicyModel) -> None:
    """Drop gathered weights, which stay after a forward pass that no backward pass follows."""
    for unit in units(policy):
        unit.reshard()


class TimedReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, measured while a timeline is given."""

    def __init__(self) -> None:
        super().__init__()
        self._timeline: Timeline | None = None
        self._micro_batch: int | None = None

    def measure(self, policy: nn.Module) -> None:
        """Run every reduction of this model's gradients through here."""
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(self)

    @contextmanager
    def during(self, timeline: Timeline, micro_batch: int) -> Iterator[None]:
        """Put the reductions of a backward pass on `timeline`."""
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
