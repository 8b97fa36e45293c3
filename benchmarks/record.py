"""Measures what recording a training step costs the driver: CPU, memory, and bytes on disk.

    python benchmarks/record.py --quick                   few steps
    python benchmarks/record.py --json results.json

Real: the step recorder, the rows, and the recorder with its files. Generated: samples with random tokens, logprobs and
words, which compress worse than real ones, and the spans and gauges of a run of two ranks and two servers. Steps follow
each other at once; the record is flushed as often as in steps of ten seconds.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from command_line import parser_of, write_json
from measure import provenance

from telescope.environments.types import PreparedPrompt, RewardRecord
from telescope.inference.base import Generation
from telescope.orchestrator.groups import Batch, Group
from telescope.orchestrator.prompt_sampler import SampledPrompt, SamplerPosition
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.step_recorder import StepRecorder, TrainedStep
from telescope.record.recorder import Recorder
from telescope.rollout.sample_rows import assign_rows, encode_rows
from telescope.rollout.trajectory import Trajectory, Turn
from telescope.trainer.batch import SampleTokens, StepInput, StepResult
from telescope.utils.timeline import Span

NUM_SAMPLES, LENGTH, STEP_SECONDS = 128, 4096, 10.0
"""Samples of a step, tokens of an answer, and duration of a step, for gauges and flushes."""
GROUP_SIZE = 8
NUM_RECORDED = 8
"""Samples per step in the table `tokens`: the default of `record_tokens`."""

SPANS_PER_STEP = 400
"""Two ranks with 20 micro-batches of ten operations."""

GAUGES_PER_SECOND = 60
"""Gauges that change, of two ranks, two servers and a machine."""

FLUSH_SECONDS = 2.0
"""`metrics_logger_interval_seconds`."""

NUM_PARTS = 10
"""Parts of the run whose means are reported, to show a trend."""

DRAW = np.random.default_rng(0)
WORDS = np.array(["".join(map(chr, DRAW.integers(97, 123, length))) for length in DRAW.integers(1, 9, 5000)])


def make_group(n: int, length: int) -> Group:
    """Returns a finished group with answers of `length` tokens."""
    prompt = PreparedPrompt(list(range(200)), "What is 6 x 7? " * 40, [], f"item {n}")
    made = Group(SampledPrompt(n, 0, n, 0), "math", prompt, GROUP_SIZE, 0, opened_at=1.0, finished_at=2.0)
    for index in range(GROUP_SIZE):
        sample = Trajectory(made.sample_id(index), n, index, "math")
        ids, logprobs = DRAW.integers(0, 150_000, length, dtype=np.int32), DRAW.normal(size=length).astype(np.float32)
        generation = Generation(ids, logprobs, "stop", [(0, 0, length)])
        text = " ".join(WORDS[DRAW.integers(0, len(WORDS), 3 * length // 4)])
        sample.turns.append(Turn(prompt.token_ids, generation, text, 1.0, 2.0))
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
    return {table.name: sum(file.stat().st_size for file in table.iterdir()) for table in tables}


def write_events(recorder: Recorder, groups: list[Group]) -> None:
    """Writes what engines and collectors report during a step, with the flushes of that time."""
    samples = [sample for group in groups for sample in group.samples]
    for part in np.array_split(np.arange(len(samples)), max(1, int(STEP_SECONDS / FLUSH_SECONDS))):
        for place in part:
            for name in ("queue", "prefill", "decode"):
                span = {"name": name, "component": "inference", "server": int(place) % 2, "start": time.time()}
                recorder.write("spans", {**span, "end": time.time(), "sample_id": samples[place].sample_id})
        for number in range(int(GAUGES_PER_SECOND * FLUSH_SECONDS)):
            gauge = {"time": time.time(), "name": f"gauge_{number % GAUGES_PER_SECOND}", "component": "inference"}
            recorder.write("gauges", {**gauge, "value": DRAW.random(), "server": number % 2, "node": "machine"})
        recorder.flush()


async def measure(num_steps: int, folder: Path) -> dict[str, object]:
    """Records `num_steps` steps and returns CPU, bytes and memory, as means over parts of the run."""
    cpu, loop, num_bytes, memory = [], [], [0], []
    process = psutil.Process()
    with Recorder(folder, flush_seconds=3600.0) as recorder:
        steps = StepRecorder(recorder, RunStatus("benchmark", num_steps))
        for step in range(num_steps):
            groups = [make_group(step * NUM_SAMPLES + i, LENGTH) for i in range(NUM_SAMPLES // GROUP_SIZE)]
            for group in groups:  # as rollout workers and their pool do
                assign_rows(group.samples, encode_rows(group.samples, set()))
            tokens = [make_tokens(group) for group in groups[:NUM_RECORDED]]
            spans = [Span("forward", 1.0 + i, 1.5 + i, i % 2, i) for i in range(SPANS_PER_STEP)]
            result = StepResult({"grad_norm": 1.0, "learning_rate": 1e-6}, spans, tokens)
            batch = Batch(groups, np.full(NUM_SAMPLES, 0.5), [StepInput(step, step, [])], {})
            position = SamplerPosition(step, ())
            of_process, of_loop = time.process_time(), time.thread_time()
            write_events(recorder, groups)
            await steps.trained(TrainedStep(step, batch, result, {}, time.time() - 9, 9.0, 1.0, position))
            loop.append(time.thread_time() - of_loop)
            recorder.flush()
            cpu.append(time.process_time() - of_process)
            num_bytes.append(sum(bytes_by_table(folder).values()))
            memory.append(process.memory_info().rss / 2**20)
    parts = np.array_split(np.arange(num_steps), min(NUM_PARTS, num_steps))
    mean_cpu = float(np.mean(cpu[1:]))
    return {
        "steps": num_steps,
        "samples_per_step": NUM_SAMPLES,
        "tokens_per_sample": LENGTH,
        "seconds_per_step": STEP_SECONDS,
        "cpu_ms_per_step": round(1e3 * mean_cpu, 1),
        "event_loop_ms_per_step": round(1e3 * float(np.mean(loop[1:])), 1),
        "share_of_one_core": round(mean_cpu / STEP_SECONDS, 5),
        "seconds_per_step_at_one_percent": round(100 * mean_cpu, 2),
        "cpu_ms_per_step_over_time": [round(1e3 * float(np.mean(np.array(cpu)[part])), 1) for part in parts],
        "kb_per_step_over_time": [
            round((num_bytes[part[-1] + 1] - num_bytes[part[0]]) / len(part) / 1e3, 1) for part in parts
        ],
        "rss_mib_over_time": [round(max(np.array(memory)[part])) for part in parts],
        "bytes_per_step": {name: size // num_steps for name, size in bytes_by_table(folder).items()},
        "files": {
            path.name: len(list(path.iterdir())) for path in sorted((folder / "tables").iterdir()) if path.is_dir()
        },
    }


def main() -> None:
    arguments = parser_of(__doc__, "20 steps instead of 1,000").parse_args()
    with tempfile.TemporaryDirectory(prefix="telescope-record-") as folder:
        result = asyncio.run(measure(20 if arguments.quick else 1000, Path(folder)))
    report = {**provenance(["numpy", "pyarrow"]), **result}
    print(json.dumps(report, indent=1))
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
