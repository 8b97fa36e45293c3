"""Fields of runs for the list of runs: settings, last values of metrics, newest results of evals.

Owns their names (`config.learning_rate`, `last.entropy`, `eval.math500`) and which settings make two runs the same
experiment. Does not own the cache: values of a run are read again when its tables grew.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import pyarrow.compute as pc

from telescope.health.rules import WINDOW
from telescope.record.reader import Run, superseded

CONFIG, LAST, EVAL = "config.", "last.", "eval."

SEED = "seed"

BOOKKEEPING = frozenset(
    {
        *("run_dir", "wandb_project", "wandb_run_name", "wandb_tags", "resume_from_checkpoint", "resume_force"),
        *("inference_base_port", "otlp_receiver_port"),
    }
)
"""Settings that say where a run is and what it is called, not what it does."""

MOST_EXAMPLES = 4
"""Values of a field that the choice of columns shows."""


def values_of(run: Run, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all fields of a run: settings, means of the last 10 steps, and the newest accuracy of each eval."""
    fields = {CONFIG + name: value for name, value in config.items()}
    steps, _ = run.rows_since("steps", max(0, run.num_rows("steps") - 3 * WINDOW), ["attempt", "step", "metrics"])
    if steps.num_rows:
        steps = steps.filter(pc.invert(superseded(steps, run.cutoffs())))
    rows = [dict(row) for row in steps["metrics"].to_pylist()[-WINDOW:] if row]
    for name in sorted({name for row in rows for name in row}):
        values = [value for value in (row.get(name) for row in rows) if value is not None and math.isfinite(value)]
        if values:
            fields[LAST + name] = _mean(values)
    evals, _ = run.rows_since("evals", 0, ["name", "version", "status", "accuracy"])
    newest: dict[str, int] = {}
    for row in evals.to_pylist():
        name, version = row["name"], row["version"] or 0
        if name and row["accuracy"] is not None and version >= newest.get(name, version):
            newest[name], fields[EVAL + name] = version, row["accuracy"]
    return fields


def _mean(values: list[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum is no float, the mean may be one
        return sum(value / len(values) for value in values)


def known_fields(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns every field that a run has, with the number of runs and of different values, and some of the values."""
    found: dict[str, dict[str, Any]] = {}
    numbers: dict[str, int] = {}
    for fields in runs:
        for name, value in fields.items():
            found.setdefault(name, {}).setdefault(json.dumps(value, sort_keys=True, default=str), value)
            numbers[name] = numbers.get(name, 0) + 1
    return [
        {"name": name, "runs": numbers[name], "values": len(values), "examples": list(values.values())[:MOST_EXAMPLES]}
        for name, values in sorted(found.items())
    ]


def experiment(config: Mapping[str, Any]) -> str:
    """Returns the same text for runs whose settings differ in the seed and bookkeeping alone."""
    kept = {name: value for name, value in config.items() if name != SEED and name not in BOOKKEEPING}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
