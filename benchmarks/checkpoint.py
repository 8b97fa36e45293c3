"""Measures checkpoints: pauses of training and generation, time until durable, conversion speed.

    python benchmarks/checkpoint.py --quick                                  two small models on the CPU, 1 and 2 ranks
    python benchmarks/checkpoint.py --shapes 4b --json results.json          one engine, one trainer rank
    python benchmarks/checkpoint.py --shapes 8b --trainers 1 2 4 --dir /mnt/checkpoints

Uses the components of a training run (Ray, vLLM servers, FSDP2 ranks, `Checkpointer`) on random weights of a real
shape, with requests in flight all the time. On fewer GPUs than workers, servers and ranks share them. A training step
comes first, so each checkpoint has weights and optimizer state. The first checkpoint allocates the memory of the copy
and is reported separately. Seconds, medians over the others:

- pause: the ranks copy their state and cannot train;
- durable: from the request until the files are on disk and the checkpoint has its name; training goes on;
- generation: the longest time without a new token until the checkpoint is durable, and in as long a time before it.

A conversion writes one checkpoint as a Hugging Face model. Its speed is that of the bytes written, next to a plain
sequential write of as many bytes to the same disk, with fsync.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from command_line import command, parser_of, positive, require_gpus, show, write_json
from measure import provenance
from random_model import SHAPES, prepare_model
from tests.fakes.client import metrics_of
from trainer_case import random_samples
from weight_sync import add_set, configuration, print_logs, start_parts

from telescope.orchestrator.checkpoints import Checkpointer, CheckpointFolder
from telescope.orchestrator.conversion import convert
from telescope.orchestrator.run_components import RunComponents
from telescope.orchestrator.run_state import RunState
from telescope.orchestrator.status import RunStatus
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import choose_device

POLL_SECONDS = 0.05
"""Resolution of the time without a new token."""
BLOCK_BYTES = 64 << 20


def main() -> int:
    parser = parser_of(__doc__, "small shapes on the CPU")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--trainers", nargs="+", type=positive, help="numbers of ranks")
    parser.add_argument("--saves", type=positive, default=3, help="measured checkpoints of each case")
    parser.add_argument("--dir", type=Path, help="where checkpoints are written, by default the temporary folder")
    add_set(parser)
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    arguments.shapes = arguments.shapes or (["tiny", "60m"] if arguments.quick else ["4b"])
    arguments.trainers = arguments.trainers or ([1, 2] if arguments.quick else [1])
    device = choose_device("cpu" if arguments.quick else "auto", 0)
    rows: list[dict[str, Any]] = []
    report = {"where": provenance(["torch", "transformers", "ray"]), "command": command()}
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            model = prepare_model(Path(folder), shape)
            for num_ranks in arguments.trainers:
                rows.append(asyncio.run(measure(shape, str(model), num_ranks, device, arguments)))
                print(rows[-1], flush=True)
                write_json(arguments.json, report | {"cases": rows})
    seconds = ("pause", "durable", "generation", "generation_without")
    speeds = ("gigabytes_per_second", "disk_gigabytes_per_second")
    show(
        ("shape", "ranks", "GB", "pause", "durable", "no token: with", "without", "convert GB/s", "disk GB/s"),
        [
            (
                row["shape"], str(row["ranks"]), f"{row['gigabytes']:.2f}",
                *(f"{row['median_seconds'][name]:.2f} s" for name in seconds),
                *(f"{row['conversion'][name]:.2f}" for name in speeds),
            )
            for row in rows
        ],
        width=140,
    )  # fmt: skip
    return 0


async def measure(
    shape: str, model: str, num_ranks: int, device: torch.device, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Returns the row of one shape and number of ranks."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.dir)))
        stack.push(lambda kind, error, traceback: print_logs(folder / "run" / "logs") if error else None)
        shares = device.type == "cuda" and torch.cuda.device_count() <= num_ranks
        settings = [
            "checkpoint_every=1", "checkpoint_keep_last=1", f"share_gpus={str(shares).lower()}",
            "compare_first_steps=0",  # the step's logprobs are random
            *arguments.set,
        ]  # fmt: skip
        requests = 4 if arguments.quick else 32
        config = configuration(model, device, str(folder / "run"), 1, num_ranks, requests, settings)
        status = RunStatus("checkpoint", 0)
        parts, directory = await start_parts(shape, config, status, requests, stack)
        # Two short samples for each rank make the optimizer's state.
        samples = random_samples([64] * 2 * num_ranks, SHAPES[shape]["vocab_size"])
        step_input = pack_step(samples, step=0, version=0, seq_len=64, num_ranks=num_ranks, pad_to_multiple_of=64)
        await parts.trainer.train_step(step_input)
        checkpoints = CheckpointFolder(folder / "checkpoints")
        checkpointer = Checkpointer(config, checkpoints, parts.trainer, status, directory)
        saves = [await save(step, parts, checkpointer) for step in range(1, arguments.saves + 2)]
        if checkpoints.steps() != [arguments.saves + 1]:
            raise RuntimeError(f"the last checkpoint failed: {list(status.messages)}")
        newest = checkpoints.folder_of(arguments.saves + 1)
        medians = {name: statistics.median(one[name] for one in saves[1:]) for name in saves[0]}
        return {
            "shape": shape,
            "ranks": num_ranks,
            "shared_gpus": shares,
            "gigabytes": round(size_of(newest) / 1e9, 3),
            "median_seconds": {name: round(value, 3) for name, value in medians.items()},
            "first_seconds": {name: round(value, 3) for name, value in saves[0].items()},
            "conversion": await asyncio.to_thread(measure_conversion, newest, folder / "converted"),
        }


async def save(step: int, parts: RunComponents, checkpointer: Checkpointer) -> dict[str, float]:
    """Writes one checkpoint under load. Returns its seconds."""
    gaps = TokenGaps(parts)
    started = time.monotonic()
    await checkpointer.after_step(step, lambda: RunState(step=step))
    paused = time.monotonic() - started
    await checkpointer.wait()
    durable = time.monotonic() - started
    during = await gaps.longest()
    gaps = TokenGaps(parts)
    await asyncio.sleep(durable)
    seconds = {
        "pause": paused,
        "durable": durable,
        "generation": during,
        "generation_without": await gaps.longest(),
    }
    print(f"checkpoint {step}: " + ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()), flush=True)
    return seconds


class TokenGaps:
    """Measures the longest time without a token, until `longest` is called."""

    def __init__(self, parts: RunComponents) -> None:
        self._tasks = [asyncio.create_task(self._watch(client)) for client in parts.inference.clients]
        self._longest = 0.0
        self._ended = False

    async def longest(self) -> float:
        """Returns the longest time of any engine."""
        self._ended = True
        await asyncio.gather(*self._tasks)
        return self._longest

    async def _watch(self, client: Any) -> None:
        count, since = -1.0, time.monotonic()
        while True:
            latest = (await metrics_of(client))["vllm:generation_tokens_total"]
            now = time.monotonic()
            if latest != count:
                count, since = latest, now
            self._longest = max(self._longest, now - since)
            if self._ended:
                return
            await asyncio.sleep(POLL_SECONDS)


def measure_conversion(checkpoint: Path, target: Path) -> dict[str, float]:
    """Returns GB/s of a conversion to disk, and of a plain write."""
    started = time.monotonic()
    convert(checkpoint, target)
    os.sync()
    seconds = time.monotonic() - started
    num_bytes = size_of(target)
    plain = plain_write_seconds(target.with_name("plain"), num_bytes)
    return {
        "gigabytes": round(num_bytes / 1e9, 3),
        "gigabytes_per_second": round(num_bytes / 1e9 / seconds, 3),
        "disk_gigabytes_per_second": round(num_bytes / 1e9 / plain, 3),
    }


def plain_write_seconds(path: Path, num_bytes: int) -> float:
    """Writes as many bytes in order, with fsync, and removes them. Returns the seconds."""
    block = os.urandom(min(BLOCK_BYTES, num_bytes))
    started = time.monotonic()
    with path.open("wb") as file:
        left = num_bytes
        while left > 0:
            left -= file.write(block[: min(left, len(block))])
        file.flush()
        os.fsync(file.fileno())
    seconds = time.monotonic() - started
    path.unlink()
    return seconds


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
