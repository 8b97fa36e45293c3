"""Runs the demo for benchmarks, with a resumable results file.

Owns the start of a run, the settings that distinguish two runs, and the file. Does not own the comparison. A result is
stored under its settings, which do not include the commit: the file has the commit of every result, so an interrupted
benchmark resumes even with other code.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import REPOSITORY, provenance
from whole_run import gpu_names, packages

from telescope.record.reader import Run
from telescope.tiny_model.cache import ensure_model, ensure_tiny_model
from telescope.tiny_model.released import RELEASED

CONFIGS = REPOSITORY / "configs" / "examples"

NOT_KEPT = ("run_dir", "model_dir", "run_name", "error")
"""Fields of a summary that do not describe a finished benchmark run."""


@dataclass(frozen=True)
class DemoRun:
    """One run: the seed of model and run, the kind of embeddings, and the fields that differ from the config."""

    seed: int
    fields: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of the tiny model that differ from the demo's."""
    released: str | None = None
    """The released model that is trained instead."""
    config: str = "demo_countdown.yaml"

    @property
    def settings(self) -> dict[str, Any]:
        """Identifies this run, including the content of the demo's config."""
        config = hashlib.sha256((CONFIGS / self.config).read_bytes()).hexdigest()[:12]
        model = {"model": self.model or self.released} if self.model or self.released else {}
        return {"seed": self.seed, "tied": self.tied, **model, "fields": self.fields, "config_file": config}

    def train(self, port: int) -> dict[str, Any]:
        """Trains and returns the summary. Raises `CalledProcessError` on failure; the output shows the last lines."""
        if self.released is None:
            model = ensure_tiny_model(seed=self.seed, tied=self.tied, **self.model)
        else:
            model = ensure_model(RELEASED[self.released])
        command = [sys.executable, str(REPOSITORY / "train.py"), "--config", str(CONFIGS / self.config)]
        command += [f"--model={model}", f"--seed={self.seed}", "--use_wandb=false", f"--inference_base_port={port}"]
        command += [f"--{name}={json.dumps(value)}" for name, value in self.fields.items()]
        with tempfile.TemporaryDirectory(prefix="telescope-demo-") as folder:
            run_dir = Path(folder) / "run"
            subprocess.run([*command, f"--run_dir={run_dir}"], check=True, cwd=REPOSITORY)
            summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
            summary |= heldout_turns(run_dir)
        return {name: value for name, value in summary.items() if name not in NOT_KEPT}


def heldout_turns(run_dir: Path) -> dict[str, list[float]]:
    """Returns the share of held-out conversations with a right first, second, ... turn before and after training.

    Turns come from the environment's `info_turns` with `correct`; empty for an environment without them.
    """
    by_step: dict[int, list[list[float | None]]] = {}
    notes = (
        "select step, list(value order by number) as turns from samples join info using (attempt, sample_id) "
        "where status = 'eval' and key = 'correct' group by step, attempt, sample_id"
    )
    for row in Run(run_dir).sql(notes).to_dicts():
        by_step.setdefault(row["step"], []).append([json.loads(value) for value in row["turns"]])
    if len(by_step) < 2:
        return {}
    return {
        f"heldout_turns_{name}": [
            round(statistics.mean(turn for turn in column if turn is not None), 4)
            for column in itertools.zip_longest(*by_step[step])
        ]
        for name, step in (("before", min(by_step)), ("after", max(by_step)))
    }


class ResultsFile:
    """Results so far, by their settings; written after every run if there is a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._document: dict[str, Any] = {"results": []}
        if path is not None and path.exists():
            self._document = json.loads(path.read_text())

    def find(self, run: DemoRun) -> dict[str, Any] | None:
        """Returns the result of an equal run, if any."""
        return next((r for r in self._document["results"] if r.get("settings") == run.settings), None)

    def add(self, run: DemoRun, summary: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
        """Stores a result with its provenance."""
        result = {"settings": run.settings, **summary, "measured": where}
        self._document["results"].append(result)
        if self._path is not None:
            self._path.write_text(json.dumps(self._document, indent=1) + "\n")
        return result


def run_all(runs: Sequence[DemoRun], *, path: Path | None, port: int) -> list[dict[str, Any]]:
    """Returns the results of all `runs` in order; results in `path` are reused."""
    file = ResultsFile(path)
    results = []
    for number, run in enumerate(runs, start=1):
        result = file.find(run)
        if result is None:
            print(f"== run {number} of {len(runs)}: {run.settings}", flush=True)
            where = provenance(packages()) | ({"gpus": names} if (names := gpu_names()) else {})
            result = file.add(run, run.train(port), where)
        results.append(result)
    return results


def gain(result: dict[str, Any]) -> float:
    """Returns the absolute gain of held-out accuracy."""
    return float(result["heldout_after"] - result["heldout_before"])


def accuracy_cells(result: dict[str, Any]) -> list[str]:
    """Returns a table row: before, after, gain, steps, seconds of training and of the whole run."""
    return [
        f"{result['heldout_before']:.3f}",
        f"{result['heldout_after']:.3f}",
        f"{gain(result):+.3f}",
        str(result["steps"]),
        f"{result['training_seconds']:.0f}",
        f"{result['seconds']:.0f}",
    ]


ACCURACY_COLUMNS = ("before", "after", "gain", "steps", "training s", "whole run s")
