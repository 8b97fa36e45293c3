"""When gradients are reduced over the ranks: a span for each reduce-scatter that FSDP2 runs during a backward pass.

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

from telescope.trainer.timeline import Timeline


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
