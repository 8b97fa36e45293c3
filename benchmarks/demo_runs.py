"""Runs the demo for benchmarks, with a resumable results file.

Owns the start of a run, the settings that distinguish two runs, the file, and the table of gains. A result is
stored under its settings, which do not include the commit: the file has the commit of every result, so an interrupted
benchmark resumes even with other code.
"""

from __future__ import annotations

import argparse
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

from command_line import parser_of, positive
from measure import REPOSITORY, provenance
from rich.console import Console
from rich.table import Table
from whole_run import packages

from telescope.record.reader import Run
from telescope.tiny_model.cache import ensure_model, ensure_tiny_model
from telescope.tiny_model.released import RELEASED
from telescope.utils.process import describe_exit

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
        """Trains and returns the summary. Exits if the run fails."""
        if self.released is None:
            model = ensure_tiny_model(seed=self.seed, tied=self.tied, **self.model)
        else:
            model = ensure_model(RELEASED[self.released])
        command = [sys.executable, str(REPOSITORY / "train.py"), "--config", str(CONFIGS / self.config)]
        command += [f"--model={model}", f"--seed={self.seed}", "--use_wandb=false", f"--inference_base_port={port}"]
        command += [f"--{name}={json.dumps(value)}" for name, value in self.fields.items()]
        with tempfile.TemporaryDirectory(prefix="telescope-demo-") as folder:
            run_dir = Path(folder) / "run"
            if code := subprocess.run([*command, f"--run_dir={run_dir}"], cwd=REPOSITORY).returncode:
                sys.exit(f"The run {describe_exit(code)}.")
            summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
            summary |= heldout_turns(run_dir)
        return {name: value for name, value in summary.items() if name not in NOT_KEPT}


def fields_of_environment(name: str, num_items: int, **kwargs: Any) -> dict[str, Any]:
    """Returns the fields of a run that trains on an environment and evaluates items unseen by training and warm
    start."""
    held_out = {
        "name": name, "kwargs": {**kwargs, "portion": "heldout"}, "num_samples": num_items,
        "separate_eval_samples": True, "temperature": 1.0,
    }  # fmt: skip
    return {
        "environments": [{"name": name, "kwargs": {**kwargs, "portion": "train"}}],
        "environments_path": ["benchmarks/environments"],
        "evals": [held_out],
    }


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


def parser_of_runs(description: str | None, quick: str, steps: str) -> argparse.ArgumentParser:
    """Returns a parser with the arguments of a benchmark that trains the demo."""
    parser = parser_of(description, quick)
    parser.add_argument("--seeds", type=int, nargs="+", help="of model and run (default: 0 1 2, with --quick 0)")
    parser.add_argument("--steps", type=positive, help=f"training steps (default: {steps})")
    parser.add_argument("--port", type=int, default=8100, help="inference_base_port")
    return parser


def parse_runs(parser: argparse.ArgumentParser, *, quick_steps: int | None = None) -> argparse.Namespace:
    """Parses the command line. --quick replaces only the defaults of seeds and steps."""
    arguments = parser.parse_args()
    arguments.seeds = arguments.seeds or ([0] if arguments.quick else [0, 1, 2])
    if arguments.quick:
        arguments.steps = arguments.steps or quick_steps
    return arguments


def run_all(runs: Sequence[DemoRun], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the results of all `runs` in order; those in --json are reused."""
    file = ResultsFile(arguments.json)
    results = []
    for number, run in enumerate(runs, start=1):
        result = file.find(run)
        if result is None:
            print(f"== run {number} of {len(runs)}: {run.settings}", flush=True)
            where = provenance(packages())
            result = file.add(run, run.train(arguments.port), where)
        results.append(result)
    return results


def gain(result: dict[str, Any]) -> float:
    """Returns the absolute gain of held-out accuracy."""
    return float(result["heldout_after"] - result["heldout_before"])


def compare(what: str, named: Sequence[tuple[str, DemoRun]], arguments: argparse.Namespace, aim: float) -> int:
    """Trains the runs and prints accuracies by name and seed, in red below the aim; returns the exit code."""
    results = run_all([run for _, run in named], arguments)
    table = Table(what, "seed", "before", "after", "gain", "steps", "training s", "whole run s", "right by turn")
    gains: dict[str, list[float]] = {}
    for (name, run), result in sorted(zip(named, results, strict=True), key=lambda row: row[0][0]):
        gains.setdefault(name, []).append(gain(result))
        by_turn = [
            " ".join(f"{share:.2f}" for share in result.get(f"heldout_turns_{when}", ()))
            for when in ("before", "after")
        ]
        table.add_row(
            name, str(run.seed), f"{result['heldout_before']:.3f}", f"{result['heldout_after']:.3f}",
            f"{gain(result):+.3f}", str(result["steps"]), f"{result['training_seconds']:.0f}",
            f"{result['seconds']:.0f}", " to ".join(filter(None, by_turn)),
            style="red" if gain(result) < aim else None,
        )  # fmt: skip
    console = Console()
    console.print(table)
    for name, of_name in gains.items():
        console.print(f"{name}: median gain {statistics.median(of_name):+.3f}, smallest {min(of_name):+.3f}")
    temperature, items = results[0]["heldout_temperature"], results[0]["heldout_items"]
    console.print(f"aim {aim:+.2f} each; {items} held-out items at temperature {temperature:g}")
    return int(min(map(gain, results)) < aim and not arguments.quick)
