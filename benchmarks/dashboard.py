"""Measures the server of the dashboard on a generated run.

    python benchmarks/dashboard.py --quick                    1,000 steps x 128 samples
    python benchmarks/dashboard.py --steps 10000 --samples 100
    python benchmarks/dashboard.py --keep /tmp/run            keeps the run, for `telescope ui /tmp/run`

Asks each address that a page reads, in this process and without a network: the first time, when the tables are read
from disk, and as the median of the next times, with different parameters where pages have them. Memory is that of the
process.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from fastapi.testclient import TestClient
from measure import provenance
from rich.console import Console
from rich.table import Table

from telescope.dashboard.app import create_app
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run, end_run
from telescope.record.tables import TABLES

GROUP = 8
"""Samples of a prompt."""
NUM_METRICS = 120
"""Metrics of a step, as many as a run has."""
ANSWER_WORDS = 150
SPANS_PER_SAMPLE = 4
CHUNK_STEPS = 4
"""Steps whose rows are written at once: with 128 samples, a file of samples (`rollout_block_size`)."""
SECONDS = 20.0
"""Duration of a step."""
T0 = 1_800_000_000.0
WORDS = ("so", "the", "sum", "of", "these", "two", "numbers", "is", "not", "quite", "seven", "then", "we", "check")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,000 steps x 128 samples, as without arguments")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=128, help="samples of a step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="write the run here and keep it; an existing one is used")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = arguments.keep or Path(folder) / "run"
        begin = time.perf_counter()
        if not run_dir.exists():
            write_run(run_dir, arguments.steps, arguments.samples)
        print(f"{run_dir}: {time.perf_counter() - begin:.0f} s, {size(run_dir) / 2**20:.0f} MiB", flush=True)
        rows = measure(run_dir, arguments.steps, arguments.repeats)
    table = Table("address", "first, ms", "then, ms", "largest, ms", "KiB", box=None)
    for row in rows:
        numbers = [f"{row[name]:.0f}" for name in ("first_ms", "median_ms", "largest_ms", "kib")]
        table.add_row(row["address"], *numbers)
    memory = psutil.Process().memory_info().rss / 2**20
    Console(width=140).print(table, f"{memory:.0f} MiB of memory in use by this process")
    if arguments.json:
        shape = {"steps": arguments.steps, "samples": arguments.samples, "memory_mib": memory}
        report = {"where": provenance(["fastapi", "duckdb", "pyarrow"]), **shape, "addresses": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure(run_dir: Path, num_steps: int, repeats: int) -> list[dict[str, Any]]:
    """Returns the times of each address in milliseconds."""
    client = TestClient(create_app([run_dir]), base_url="http://localhost")
    ((run_id,),) = ([row["id"]] for row in client.get("/api/runs").json()["runs"])
    run = f"/api/runs/{run_id}"
    middle = num_steps // 2
    addresses: list[list[str]] = [
        ["/api/runs"],
        [run],
        [f"{run}/steps"],
        [f"{run}/health"],
        [f"{run}/distribution?metric=completion_tokens"],
        [f"{run}/groups?step={middle + place}" for place in range(repeats + 1)],
        [f"{run}/samples?limit=100"],
        [f"{run}/samples?limit=100&status=kept&step_min={place}" for place in range(repeats + 1)],
        [f"{run}/samples?limit=100&reward={place % 2}&sort=-completion_tokens" for place in range(repeats + 1)],
        [f"{run}/samples?limit=100&search=number {place}" for place in range(repeats + 1)],
        [f"{run}/samples?limit=100&search=number 1&offset={100 * place}" for place in range(repeats + 1)],
        [f"{run}/samples/1/{middle * GROUP + place}-0" for place in range(repeats + 1)],
        [f"{run}/spans?limit=40000&buckets=2000"],
        [f"{run}/spans?start={T0 + SECONDS * middle}&end={T0 + SECONDS * (middle + 3)}"],
        [f"{run}/gauges?names=queue_depth&points=400"],
        [f"{run}/logs"],
        [f"{run}/logs?search=step {place}" for place in range(repeats + 1)],
    ]
    rows = []
    for choices in addresses:
        times, answer = [], None
        for place in range(repeats + 1):
            begin = time.perf_counter()
            answer = client.get(choices[place % len(choices)])
            times.append(1000 * (time.perf_counter() - begin))
            assert answer.status_code == 200, answer.text
        assert answer is not None
        then = {
            "median_ms": statistics.median(times[1:]),
            "largest_ms": max(times[1:]),
            "kib": len(answer.content) / 1024,
        }
        rows.append({"address": choices[0].removeprefix(run) or run, "first_ms": times[0], **then})
    return rows


def write_run(run_dir: Path, num_steps: int, num_samples: int) -> None:
    """Writes a finished run of the given shape, with random numbers and texts."""
    config = json.dumps({"values": {"model": "generated", "algorithm": "grpo", "environments": []}, "user_set": []})
    chosen = random.Random(0)
    with Recorder(run_dir) as recorder:
        info = begin_run(
            recorder, name=run_dir.name, config_hash="generated", config_json=config, first_step=0, num_steps=num_steps
        )
        for first in range(0, num_steps, CHUNK_STEPS):
            rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
            for step in range(first, min(first + CHUNK_STEPS, num_steps)):
                add_step(rows, chosen, step, num_samples)
            for name, added in rows.items():
                for row in added:
                    recorder.write(name, row)
            recorder.flush()
        end_run(recorder, info, "finished", config_json=config)


def add_step(rows: dict[str, list[dict[str, Any]]], chosen: random.Random, step: int, num_samples: int) -> None:
    """Adds the rows of one step."""
    start = T0 + SECONDS * step
    for group in range(num_samples // GROUP):
        group_id = step * (num_samples // GROUP) + group
        kept = group % 4 != 0
        status = {"status": "kept" if kept else "discarded", "reason": None if kept else "zero_advantage"}
        names = {"group_id": group_id, "environment": ("countdown", "wordle")[group % 2], "step": step, **status}
        rewards = [float(chosen.random() < 0.5) for _ in range(GROUP)]
        mean = sum(rewards) / GROUP
        rows["groups"].append({**names, "num_samples": GROUP, "reward_mean": mean, "reward_std": 0.5})
        prompt = f"<|im_start|>user\nMake number {group_id} of {chosen.choices(range(100), k=4)}<|im_end|>\n"
        for place, reward in enumerate(rewards):
            sample = f"{group_id}-{place}"
            text = " ".join(chosen.choices(WORDS, k=ANSWER_WORDS))
            length = chosen.randrange(100, 400)
            times = {"started_at": start, "generated_at": start + 10, "finished_at": start + 11}
            rows["samples"].append(
                {
                    **{**names, **times, "sample_id": sample, "sample_index": place, "reward": reward},
                    **{"advantage": reward - mean, "prompt_text": prompt, "completion_text": text, "num_turns": 1},
                    **{"metrics": {"correct": reward, "format": 1.0}, "tags": {"level": str(group)}, "age": step % 3},
                    **{"stop_reason": "stop", "prompt_tokens": 40, "completion_tokens": length, "server": 0},
                    **{"lane": group * GROUP + place, "total_tokens": 40 + length},
                }
            )
            rows["turns"].append(
                {"sample_id": sample, "turn": 0, "role": "assistant", "text": text, "num_tokens": length}
            )
            for part in range(SPANS_PER_SAMPLE):
                name = ("queue", "prefill", "decode", "generate")[part]
                span = {"name": name, "component": "inference", "server": 0, "step": step, "sample_id": sample}
                lane = {"lane": str(group * GROUP + place)}
                begin = start + 2.5 * part
                rows["spans"].append({**span, "start": begin, "end": begin + 2.4, "attributes": lane})
    metrics = {f"section_{number % 12}/group/metric_{number}": chosen.random() for number in range(NUM_METRICS - 4)}
    metrics |= {
        "reward/all_groups/mean": chosen.random(),
        "entropy": 1.0,
        "grad_norm": 1.0,
        "timing_step_total": SECONDS,
    }
    ends = {"started_at": start, "ended_at": start + SECONDS, "num_tokens_trained": 1000}
    rows["steps"].append({"step": step, "version": step + 1, "reward_mean": 0.5, **ends, "metrics": metrics})
    for part in range(10):
        gauge = {"time": start + 2 * part, "name": "queue_depth", "component": "orchestrator"}
        rows["gauges"].append({**gauge, "value": chosen.random()})
    line = {"time": start, "level": "INFO", "component": "driver", "message": f"step {step} has ended"}
    rows["logs"].append(line)


def size(folder: Path) -> int:
    """Returns the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
