"""Divides the time of engines and trainer ranks by use. Returns plain data for the API.

The time of an engine counts from the start of an attempt to its last sample or step. `timing_engines_idle` counts as
idle, the time before the first request as start, and the rest is divided in proportion to generated tokens. Evals of
`telescope eval` run on engines of their own and are left out. The time of a rank is divided by the phases of the
steps. The time outside of steps is for the start, evals before training, and restarts.
"""

import math
import re
from collections import Counter
from typing import Any

import numpy as np

from telescope.dashboard.store import RunStore
from telescope.record.files import STANDALONE

GPUS = re.compile(r"([\d.]+) GPUs?$")
"""Matches an engine's number of GPUs at the end of its place in `topology`."""

PHASES = {
    "waits": ("timing_waiting_for_data",),
    "forward": ("timing_forward_rank_mean", "timing_reference_logprobs_rank_mean"),
    "backward": ("timing_backward_rank_mean",),
    "optimizer": ("timing_optimizer_rank_mean", "timing_gradient_norm_rank_mean"),
    "weight sync": ("timing_weight_sync_trainer_total",),
}
"""Step metrics for each phase of a rank, in seconds."""

PART = "CASE WHEN status = 'discarded' AND reason = 'max_async' THEN 'stale' ELSE status END"
OWN = f"NOT starts_with(sample_id, '{STANDALONE}')"
"""Samples of the run's own engines: `telescope eval` adds samples of others to the record."""
SUMS = (
    "min(started_at) FILTER (started_at >= CASE attempt {began} ELSE 0 END) AS first, max(finished_at) AS last, "
    "sum(completion_tokens) AS tokens, sum(wasted_tokens) AS lost"
)
"""Sums of an attempt's samples. A resumed run has samples that began in an earlier attempt."""


def costs(store: RunStore) -> dict[str, Any]:
    """Returns generated tokens by outcome, and the GPU-seconds (or process-seconds) of engines and ranks by use."""
    _, columns, metrics = store.steps()
    times: dict[int, list[float]] = {}
    for number, end in zip(columns["attempt"], columns["ended_at"], strict=True):
        times.setdefault(number, []).append(end or 0.0)
    first: dict[int, float] = {}
    tokens: Counter[str] = Counter()
    attempts = store.run.attempts()
    starts = {0: 0.0} | {attempt["attempt"]: attempt["started_at"] or 0.0 for attempt in attempts}
    sums = SUMS.format(began=" ".join(f"WHEN {number} THEN '{start}'::DOUBLE" for number, start in starts.items()))
    for row in store.aggregate("samples", f"attempt, {PART} AS part, {sums}", "attempt, part", OWN):
        tokens.update({row["part"]: int(row["tokens"] or 0), "lost": int(row["lost"] or 0)})
        times.setdefault(row["attempt"], []).append(row["last"] or 0.0)
        first[row["attempt"]] = min(row["first"] or math.inf, first.get(row["attempt"], math.inf))
    engines, ranks, starting, on_gpus = 0.0, 0.0, 0.0, False
    num_engines: dict[int, float] = {}
    num_ranks: dict[int, float] = {}
    for attempt in attempts:
        began, topology = attempt["started_at"], attempt["topology"] or {}
        number = attempt["attempt"]
        wall = max(0.0, max(times.get(number, ()), default=0.0) - began) if began else 0.0
        places = [place for name, place in topology.items() if name.startswith("inference server")]
        counts = [GPUS.search(place) for place in places]
        on_gpus = on_gpus or any(counts)
        num_engines[number] = sum(float(found[1]) if found else 1.0 for found in counts)
        num_ranks[number] = float(sum(name.startswith("trainer rank") for name in topology))
        engines, ranks = engines + wall * num_engines[number], ranks + wall * num_ranks[number]
        starting += num_engines[number] * min(wall, max(0.0, first.get(number, math.inf) - (began or 0.0)))

    def seconds(name: str, num_of: dict[int, float]) -> float:
        if name not in metrics:
            return 0.0
        values = np.array(metrics[name]) * [num_of.get(number, 0.0) for number in columns["attempt"]]
        return float(values[np.isfinite(values)].sum())

    idle = min(engines, seconds("timing_engines_idle", num_engines))
    busy, generated = max(0.0, engines - idle - starting), max(1, sum(tokens.values()))
    phases = {part: sum(seconds(name, num_ranks) for name in names) for part, names in PHASES.items()}
    in_steps = seconds("timing_step_total", num_ranks)
    phases["other"] = max(0.0, in_steps - sum(phases.values()))
    return {
        "unit": "GPU" if on_gpus else "process",
        "tokens": {part: count for part, count in tokens.items() if count},
        "engines": {
            **{part: busy * share / generated for part, share in tokens.items()},
            "idle": idle,
            "start": starting,
        },
        "trainer": {**phases, "outside steps": max(0.0, ranks - sum(phases.values()))},
    }
