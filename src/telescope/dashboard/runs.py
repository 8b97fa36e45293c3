"""Returns the list of runs, one run with its steps and health, and comparisons of configs as plain data for the API."""

import math
import os
import re
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pyarrow.compute as pc
from fastapi import Query

import telescope
from telescope.dashboard import api
from telescope.dashboard.curves import evals
from telescope.dashboard.models import FROM_SUMMARY, Now
from telescope.dashboard.registry import BOOKKEEPING, Listing, Registry, config_of, json_object
from telescope.dashboard.remote import RunCopy
from telescope.dashboard.steps import StepMetrics
from telescope.dashboard.store import RunStore
from telescope.health import rules, verdict
from telescope.health.rules import EvalPoint, History
from telescope.record.files import RunFiles
from telescope.record.gauges import REPEAT_SECONDS
from telescope.record.reader import Run

CHECKPOINT = re.compile(r"step_(\d+)")
"""Name of a checkpoint's folder."""

NEWEST_GAUGES = 4000
"""Number of newest gauge rows that are searched first, about 20 seconds of a small run."""

WAITING = "vllm:num_requests_waiting"


FIELDS = Query(description="Names of fields to add to each run, with commas between.")


def run_rows(registry: Registry, fields: Annotated[str, FIELDS] = "") -> dict[str, Any]:
    """Returns the page of runs: rows, problems and roots. Each row has the named fields."""
    names = [name for name in fields.split(",") if name]
    rows = []
    for run_id, listing in registry.listings():
        row = run_row(run_id, listing, registry.copy_in(listing.summary.path))
        rows.append({**row, "fields": {name: listing.fields.get(name) for name in names}})
    return {"runs": rows, "problems": registry.problems, "roots": [str(root) for root in registry.roots]}


def run_row(run_id: str, listing: Listing, copy: RunCopy | None) -> dict[str, Any]:
    """Returns one row of the page of runs. `copy` belongs to a run on W&B."""
    summary, config = listing.summary, listing.config
    environments = listed if isinstance(listed := config.get("environments"), list) else []
    curve, after = listing.heldout, max(listing.heldout, default=0)
    saved = set(checkpoints_of(RunFiles(summary.path))) & curve.keys()
    heldout = {"heldout_before": curve.get(0), "heldout_after": curve[after] if after else None}
    return {
        "id": run_id,
        "key": summary.run_id or summary.label,
        **{name: getattr(summary, name) for name in FROM_SUMMARY},
        **{name: value for name, value in heldout.items() if value is not None},
        "heldout_step": after or None,
        "metrics": listing.metrics,
        "best_checkpoint": max(saved, key=lambda step: (curve[step], step), default=None),
        "live": summary.status == "live",
        "tags": list(summary.tags),
        "model": config.get("model"),
        "algorithm": config.get("algorithm"),
        "environments": [str(entry.get("name") or "") for entry in environments if isinstance(entry, dict)],
        "rewards": listing.rewards,
        "experiment": listing.experiment,
        "fields": {},
        "remote": None if copy is None else asdict(copy.state),
        **({} if copy is None else copy.numbers()),
    }


def run_info(registry: Registry, run_id: api.RunId) -> dict[str, Any]:
    """Returns everything about a run that does not change with its steps."""
    store = registry.store(run_id)
    config, user_set = config_of(store.run)
    store.refresh("environments", "nodes")
    nodes = store.rows(
        "SELECT * FROM nodes QUALIFY row_number() OVER (PARTITION BY node ORDER BY time DESC) = 1 ORDER BY node"
    )
    environments = store.rows("SELECT * FROM environments ORDER BY attempt, key")
    newest = max((row["attempt"] for row in environments), default=None)
    for row in environments:
        row["metrics_ranges"] = json_object(row["metrics_ranges"])
        row["tags_options"] = json_object(row["tags_options"])
    return {
        "info": run_row(run_id, registry.listing(run_id), registry.copy_in(store.run.files.run_dir)),
        "config": config,
        "user_set": user_set,
        "attempts": [
            {
                **{name: value for name, value in row.items() if name != "model_config"},
                **{"notes": row["notes"] or [], "versions": row["versions"] or {}, "topology": row["topology"] or {}},
            }
            for row in store.run.attempts()
        ],
        "environments": [row for row in environments if row["attempt"] == newest],
        "nodes": [{**row, "gpus": row["gpus"] or [], "links": row["links"] or []} for row in nodes],
        "result": store.run.result,
        "checkpoints": checkpoints_of(store.run.files),
        "written": _written(store),
        "path": _shell_path(store.run.files.run_dir),
        "final_model": _shell_path(model) if any((model := store.run.files.model).glob("*.safetensors")) else None,
        "unreadable": [path.as_posix() for path in store.run.unreadable],
        "version": telescope.__version__,
    }


def _shell_path(path: Path) -> str:
    """Returns a path as a person types it in a shell in the server's folder."""
    here, path = Path.cwd(), path.absolute()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def checkpoints_of(files: RunFiles) -> list[int]:
    """Returns the checkpoints in the run directory, as numbers of finished steps."""
    try:
        names = [entry.name for entry in os.scandir(files.checkpoints) if entry.is_dir()]
    except OSError:
        return []  # no readable folder, because the run keeps its checkpoints elsewhere
    return sorted(int(match[1]) for name in names if (match := CHECKPOINT.fullmatch(name)))


def _written(store: RunStore) -> list[int] | None:
    """Returns the checkpoints that an ended run has written, without superseded ones. None without their spans."""
    end = store.run.num_rows("spans")
    if store.run.status == "live" or not end:
        return None  # the metrics of its steps tell it meanwhile, all but the one at the end
    where = "component = 'orchestrator' AND name = 'checkpoint' AND step IS NOT NULL"
    rows = store.kept("written", end, lambda: store.aggregate("spans", "attempt, step", "attempt, step", where))
    if not rows:
        return None  # they may have been dropped
    cut = store.run.cutoffs()
    return sorted({row["step"] for row in rows if row["step"] <= cut.get(row["attempt"], math.inf)})


def steps(store: RunStore, since: api.Row = 0) -> dict[str, Any]:
    """Returns the steps from row `since` on as columns, without superseded steps."""
    end, columns, metrics = store.steps(since)
    return {"next": end, **columns, "metrics": dict(metrics)}


def health_of(store: RunStore) -> dict[str, Any]:
    """Returns verdict, health cells, alerts and progress of a run."""
    info, status = store.run.info, store.run.status
    _, read, metrics = store.steps()
    started, ended = read["started_at"], read["ended_at"]
    history = History(_columns(metrics), read["step"], eval_points(store), config_of(store.run)[0])
    found = rules.findings(history)
    live, num_steps = status == "live", info.num_steps if info else None
    progress = verdict.progress(read["step"], started, ended, num_steps, live)
    # After a resume, the newest step is from an earlier attempt until the first one has ended.
    last_end = ended[-1] if info and read["attempt"][-1:] == [info.attempt] else None
    state = verdict.State(
        status=status,
        error=info.error if info else None,
        seconds_since_step=None if last_end is None else time.time() - last_end,
        step_seconds=verdict.step_seconds(started, ended),
        is_training=num_steps is None or progress["step"] < num_steps,
    )
    store.refresh("alerts")
    rows = store.rows("SELECT * FROM alerts ORDER BY time DESC")
    return {
        "verdict": verdict.verdict(history, found, state),
        "cells": verdict.cells(history, found),
        "alerts": verdict.alerts(rows, info.attempt if info else 1, found, ended),
        "progress": progress,
    }


def _columns(metrics: StepMetrics) -> rules.Columns:
    """Returns the columns that rules read, and columns with NaN or infinity."""
    names = [name for name in metrics if name in rules.READ or name in metrics.not_finite]
    return {name: [None if math.isnan(value) else value for value in metrics[name]] for name in names}


def eval_points(store: RunStore) -> list[EvalPoint]:
    """Returns the results of the run's own evals, ordered by step."""
    return [
        EvalPoint(
            row["name"],
            row["step"],
            row["accuracy"],
            row["accuracy_low"],
            row["accuracy_high"],
            row["metric"] or "correct",
        )
        for row in evals(store)
        if row["source"] != "standalone" and row["accuracy"] is not None and math.isfinite(row["accuracy"])
    ]


def compare(registry: Registry, runs: Annotated[list[str], Query()], equal: bool = False) -> dict[str, Any]:
    """Compares settings of runs: all, or only different ones. Adds code and machines of their newest attempts."""
    # A folder may have a comma in its name, so the pages repeat the parameter.
    run_ids = runs if len(runs) > 1 else [run for run in runs[0].split(",") if run]
    stores = [registry.store(run_id) for run_id in run_ids]
    configs = [config_of(store.run)[0] for store in stores]
    names = dict.fromkeys(name for config in configs for name in config)
    differing = [name for name in names if any(config.get(name) != configs[0].get(name) for config in configs)]
    attempts = []
    for run_id, store in zip(run_ids, stores, strict=True):
        newest = (store.run.attempts() or [{}])[-1]
        kept = {name: newest.get(name) for name in ("started_at", "git_commit", "git_dirty", "host")}
        maps = {name: newest.get(name) or {} for name in ("versions", "topology")}
        attempts.append({"run": run_id, **kept, **maps})
    rows = [
        {"key": name, "values": [config.get(name) for config in configs], "bookkeeping": name in BOOKKEEPING}
        for name in (names if equal else differing)
    ]
    return {"runs": run_ids, "config": rows, "num_differing": len(differing), "attempts": attempts}


def now_of(run: Run) -> dict[str, Any]:
    """Returns phase, requests, servers and queue of a run. If it has ended, `live` is false and the rest is empty."""
    now = run.now() or {}
    components = {str(part): str(doing) for part, doing in (now.get("components") or {}).items()}
    oldest = pc.min(run.in_flight()["started_at"]).as_py() if now else None
    return {
        **{name: now.get(name) for name in Now.model_fields},
        "live": run.status == "live",
        "age_seconds": None if now.get("time") is None else time.time() - now["time"],
        "trainer": components.pop("trainer", None),
        "servers": [
            {"name": part, "doing": components.pop(part)}
            for part in sorted(components, key=lambda part: (int("".join(filter(str.isdecimal, part)) or 0), part))
            if part.startswith("server ")
        ],
        "components": components,
        "num_waiting": _waiting(run) if now else None,
        "oldest_seconds": None if oldest is None else max(0.0, time.time() - oldest),
    }


def _waiting(run: Run) -> int | None:
    """Returns the number of requests waiting in the engines, by their newest gauges. None without recorded gauges."""
    end, count = run.num_rows("gauges"), NEWEST_GAUGES
    while True:
        rows, _ = run.rows_since("gauges", max(0, end - count), ["time", "name", "server", "value"])
        times = pc.min_max(rows["time"]).as_py()
        # An unchanged number is repeated every `REPEAT_SECONDS`, however many other rows come between.
        if count >= end or not rows.num_rows or times["max"] - times["min"] >= 2 * REPEAT_SECONDS:
            break
        count *= 4
    rows = rows.filter(pc.equal(rows["name"], WAITING))
    newest = dict(zip(rows["server"].to_pylist(), rows["value"].to_pylist(), strict=True))
    return int(sum(newest.values())) if newest else None
