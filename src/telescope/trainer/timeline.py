"""Computes the `timing_*` metrics of a training step, and allocator gauges.

A reading of the allocator copies counters that it keeps anyway, and does not touch the stream.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from telescope.record.gauges import Reading
from telescope.utils.timeline import Span

OPERATIONS = (
    "forward", "backward", "loss_computation", "compute_kl", "compute_entropy", "data_to_device",
    "prepare_tensors", "gradient_reduction",
)  # fmt: skip
"""Operations that are measured per micro-batch. `compute_entropy` is the fused pass for logprob and entropy.
`gradient_reduction` overlaps `backward`, on a separate stream on a GPU."""

STEP_OPERATIONS = ("gradient_norm", "optimizer")
"""Operations that are measured per optimizer step."""


def timing_metrics(spans: list[Span], num_micro_batches: int) -> dict[str, float]:
    """Computes `timing_<operation>_total` and `timing_<operation>_microbatch_mean` of one rank, in seconds."""
    totals = dict.fromkeys((*OPERATIONS, *STEP_OPERATIONS), 0.0)
    for span in spans:
        if span.name in totals:
            totals[span.name] += span.end - span.start
    metrics = {f"timing_{operation}_total": seconds for operation, seconds in totals.items()}
    for operation in OPERATIONS:
        metrics[f"timing_{operation}_microbatch_mean"] = totals[operation] / max(num_micro_batches, 1)
    return metrics


def memory_reader(device: torch.device) -> Callable[[], list[Reading]]:
    """Returns a function that reads the memory in use: torch's on a GPU, otherwise the process's."""
    if device.type == "cuda":
        return lambda: _of_allocator(device)
    import psutil

    process = psutil.Process()
    return lambda: [Reading(time.time(), "process_memory_bytes", float(process.memory_info().rss))]


def _of_allocator(device: torch.device) -> list[Reading]:
    now = time.time()
    stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    if not stats:
        return []  # nothing has been allocated yet
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    values = {
        "torch_memory_allocated_bytes": allocated["current"],
        "torch_memory_allocated_peak_bytes": allocated["peak"],
        "torch_memory_reserved_bytes": reserved["current"],
        "torch_memory_reserved_peak_bytes": reserved["peak"],
        "torch_memory_alloc_retries": stats["num_alloc_retries"],
        "torch_memory_ooms": stats["num_ooms"],
    }
    return [Reading(now, name, float(value)) for name, value in values.items()]
