"""Measures what recording a training step costs: CPU of the driver, and bytes on disk.

    python benchmarks/record.py --quick

Real: the step recorder, the rows and the recorder with its merges. Made up: the samples, with random tokens and
logprobs, which compress worse than real ones. A step is written at once and flushed, as a run with steps of a few
seconds does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import provenance

from telescope.environments.worker_pool.messages import PreparedPrompt, RewardRecord
from telescope.orchestrator.groups import Group
from telescope.orchestrator.prompt_sampler import SampledPrompt, SamplerPosition
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.step_recorder import StepRecorder, TrainedStep
from telescope.record.recorder import Recorder
from telescope.rollout.trajectory import Trajectory, Turn
from telescope.rollout.types import Generation
from telescope.trainer.batch import SampleTokens, Span, StepResult

GROUP_SIZE = 8
NUM_RECORDED = 8
"""Samples per step in the table `tokens`: the default of `record_tokens`."""

SPANS_PER_STEP = 400
"""Two ranks with 20 micro-batches of ten operations."""

PACKAGES = ("numpy", "pyarrow")

DRAW = np.random.default_rng(0)


class NoStepLog:
    """Drops what W&B would get."""

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        return


def make_group(n: int, length: int) -> Group:
    """Returns a finished group with answers of `length` tokens."""
    prompt = PreparedPrompt(list(range(200)), "What is 6 x 7? " * 40, [], f"item {n}")
    made = Group(SampledPrompt(n, 0, n, 0), "math", prompt, GROUP_SIZE, 0, opened_at=1.0, finished_at=2.0)
    for index in range(GROUP_SIZE):
        sample = Trajectory(made.sample_id(index), n, index, "math")
        ids, logprobs = DRAW.integers(0, 150_000, length), DRAW.normal(size=length).astype(np.float32)
        generation = Generation(ids, logprobs, "stop", [(0, 0, length)])
        sample.turns.append(Turn(prompt.token_ids, generation, "answer " * (length // 2), 1.0, 2.0))
        metrics = {name: float(DRAW.random()) for name in ("correct", "format", "words", "steps")}
        sample.reward = RewardRecord(float(DRAW.random()), metrics, {"answer": "42"}, [], {"kind": "easy"})
        sample.started_at, sample.generated_at, sample.finished_at = 1.0, 2.0, 2.5
        made.samples.append(sample)
    return made


def make_tokens(group: Group) -> SampleTokens:
    """Returns the tokens of the group's first sample, as the trainer returns them."""
    sample = group.samples[0]
    ids = sample.turns[0].generation.token_ids_N
    numbers = DRAW.normal(size=len(ids)).astype(np.float32)
    versions = np.zeros(len(ids), dtype=np.int32)
    return SampleTokens(sample.sample_id, ids, np.ones(len(ids), dtype=bool), numbers, versions, numbers, numbers)


def bytes_by_table(folder: Path) -> dict[str, int]:
    """Returns the bytes on disk of each table of a run."""
    tables = sorted(path for path in (folder / "tables").iterdir() if path.is_dir())
    return {table.name: sum(file.stat().st_size for file in table.glob("*.parquet")) for table in tables}


async def measure(num_steps: int, num_samples: int, length: int, folder: Path) -> dict[str, object]:
    """Records `num_steps` steps and returns CPU and bytes per step, of the first and of the second half."""
    cpu, loop, num_bytes = [], [], []
    with Recorder(folder, flush_seconds=3600.0) as recorder:
        steps = StepRecorder(recorder, NoStepLog(), RunStatus("benchmark", num_steps))
        for step in range(num_steps):
            groups = [make_group(step * num_samples + i, length) for i in range(num_samples // GROUP_SIZE)]
            tokens = [make_tokens(group) for group in groups[:NUM_RECORDED]]
            spans = [Span("forward", 1.0 + i, 1.5 + i, i % 2, i) for i in range(SPANS_PER_STEP)]
            result = StepResult({"grad_norm": 1.0, "learning_rate": 1e-6}, spans, tokens)
            advantages, position = np.full(num_samples, 0.5), SamplerPosition(step, ())
            process, thread = time.process_time(), time.thread_time()
            await steps.trained(TrainedStep(step, groups, advantages, {}, result, {}, time.time() - 9, 1.0, position))
            loop.append(time.thread_time() - thread)
            recorder.flush()
            cpu.append(time.process_time() - process)
            num_bytes.append(sum(bytes_by_table(folder).values()))
    half = num_steps // 2
    return {
        "steps": num_steps,
        "samples_per_step": num_samples,
        "tokens_per_sample": length,
        "event_loop_ms_per_step": round(1e3 * float(np.mean(loop[1:])), 1),
        "cpu_ms_per_step": [round(1e3 * float(np.mean(part)), 1) for part in (cpu[1:half], cpu[half:])],
        "bytes_per_step_at_the_end": {name: size // num_steps for name, size in bytes_by_table(folder).items()},
        "largest_bytes_on_disk": max(num_bytes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--quick", action="store_true", help="20 steps")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="telescope-record-") as folder:
        num_steps = 20 if arguments.quick else arguments.steps
        result = asyncio.run(measure(num_steps, arguments.samples, arguments.length, Path(folder)))
    text = json.dumps({**provenance(PACKAGES), **result}, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
