"""Measures a weight sync: the engines' pause, the trainer's stall, the total, bytes per second.

    python benchmarks/weight_sync.py --quick                                 a tiny model on the CPU, two minutes
    python benchmarks/weight_sync.py --shapes 4b --json results.json         one engine, one trainer rank
    python benchmarks/weight_sync.py --shapes 8b --engines 4 --trainers 4

Uses the components of a training run (Ray, vLLM servers, FSDP2 ranks, `WeightSync`), on random weights of a real shape,
with requests in flight all the time. Each shape is measured with the result of `weight_transfer: auto` and then, on the
same processes, in place. The first sync of each connects, is verified tensor by tensor, and is not counted. Seconds of
a sync:

- total: from the request until every engine samples from the new weights, as the training loop waits for it;
- stall: the ranks are busy with it and cannot train (gathering, casting, sending);
- pause: an engine does not schedule (the slowest engine's);
- transfer: from announcing it to an engine until that engine has everything;
- wait, load, swap: of the engine's worker, for bytes, for loading them, for copying them over the old ones.

`tokens_per_second` are sampled tokens of all engines, between syncs and during syncs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from command_line import command, parser_of, positive, require_gpus, show, write_json
from measure import provenance
from random_model import SHAPES, prepare_model
from tests.fakes.client import metrics_of

from telescope.cluster.reaper import Reaper
from telescope.config import TelescopeConfig, load_config
from telescope.inference.base import GenerateRequest
from telescope.inference.client import EngineClient
from telescope.orchestrator.run_components import RunComponents, start_components
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.weight_sync import WeightSync
from telescope.trainer.worker import choose_device

SETTLE_SECONDS = 1.0
"""Undisturbed sampling time between two syncs."""
ANSWER_TOKENS = 400
SYNC_TIMEOUT_SECONDS = 300.0
NUMBERS = ("total", "stall", "pause", "transfer", "wait", "load", "swap")


def main() -> int:
    parser = parser_of(__doc__, "the tiny shape on the CPU")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["4b"])
    parser.add_argument("--engines", type=positive, default=1)
    parser.add_argument("--trainers", type=positive, default=1)
    parser.add_argument("--syncs", type=positive, default=8, help="measured syncs of each kind")
    add_set(parser)
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    if arguments.quick:
        arguments.shapes, arguments.syncs = ["tiny"], 3
    device = choose_device("cpu" if arguments.quick else "auto", 0)
    rows: list[dict[str, Any]] = []
    report = {"where": provenance(["torch", "transformers", "ray"]), "command": command()}

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        write_json(arguments.json, report | {"cases": rows})

    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            model = prepare_model(Path(folder), shape)
            asyncio.run(measure(shape, str(model), device, arguments, keep))
    show(
        ("shape", "kind", "GB", *NUMBERS, "GB/s", "tokens/s between, during"),
        [
            (
                row["shape"], "background" if row["background_servers"] else "in place", f"{row['gigabytes']:.2f}",
                *(f"{row['median_seconds'][name] * 1000:.0f} ms" for name in NUMBERS),
                f"{row['gigabytes_per_second']['transfer']:.1f}",
                f"{row['tokens_per_second']['between']:,}, {row['tokens_per_second']['during']:,}",
            )
            for row in rows
        ],
        texts=2, width=140,
    )  # fmt: skip
    return 0


def add_set(parser: argparse.ArgumentParser) -> None:
    """Adds `--set`, which may be given several times."""
    text = "more configuration fields"
    parser.add_argument("--set", nargs="*", action="extend", default=[], metavar="FIELD=VALUE", help=text)


def configuration(
    model: str, device: torch.device, run_dir: str, engines: int, trainers: int, requests: int, settings: list[str]
) -> TelescopeConfig:
    on_cpu = device.type == "cpu"
    fields = {
        "model": model,
        "device": device.type,
        "environments": "[{name: countdown, kwargs: {dataset: generated, min_numbers: 3, max_numbers: 3}}]",
        "inference_num_workers": engines,
        "trainer_num_workers": trainers,
        "ray_address": "local",
        "ray_inference_cpus_per_worker": 0.5 if on_cpu else 4,
        "ray_trainer_cpus_per_worker": 0.5 if on_cpu else 4,
        "trainer_threads": 1 if on_cpu else "null",
        "inference_threads": 1 if on_cpu else "null",
        "environment_workers": 1,
        "max_tokens": ANSWER_TOKENS,
        "max_model_len": 2 * ANSWER_TOKENS,
        "seq_len": 2 * ANSWER_TOKENS,
        "max_num_seqs": requests,
        "mixed_precision_dtype": "null" if on_cpu else "bfloat16",
        "weight_probe_every": 0,  # only the first sync
        "use_wandb": "false",
        "run_dir": run_dir,
    }
    if on_cpu:
        fields["inference_kv_cache_gib"] = 1
    fields |= dict(setting.split("=", 1) for setting in settings)
    return load_config(None, [f"--{name}={value}" for name, value in fields.items()]).config


async def measure(
    shape: str,
    model: str,
    device: torch.device,
    arguments: argparse.Namespace,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Passes the rows of one shape to `keep`: `auto`, then in place if that differs."""
    async with AsyncExitStack() as stack:
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="weight-sync-"))
        stack.push(lambda kind, error, traceback: print_logs(Path(run_dir) / "run" / "logs") if error else None)
        requests = 4 if arguments.quick else 64
        config = configuration(
            model, device, f"{run_dir}/run", arguments.engines, arguments.trainers, requests, arguments.set
        )
        parts, _ = await start_parts(shape, config, RunStatus("weight_sync", 0), requests, stack)
        row = await measure_kind(parts, parts.weights, shape, arguments.syncs)
        keep(row)
        if row["background_servers"]:
            keep(await measure_kind(parts, in_place(parts), shape, arguments.syncs))


async def start_parts(
    shape: str, config: TelescopeConfig, status: RunStatus, requests: int, stack: AsyncExitStack
) -> tuple[RunComponents, RunDirectory]:
    """Starts the components of a run, prints how long it took, and keeps `requests` requests in flight on an engine."""
    begin = time.monotonic()
    reaper = stack.enter_context(Reaper())
    directory = RunDirectory.create(config, [])
    stack.enter_context(directory.open_record(console=False))
    parts = await start_components(config, directory, status, stack, reaper.directory)
    print(f"{shape}: started in {time.monotonic() - begin:.0f} s", flush=True)
    await stack.enter_async_context(load(parts, requests))
    return parts, directory


def print_logs(folder: Path) -> None:
    """Prints the last lines of every process after a failure; the folder is about to be removed."""
    for path in sorted(folder.glob("*.log")):
        print(f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-150:], sep="\n", flush=True)


def in_place(parts: RunComponents) -> WeightSync:
    """Returns syncs of the same components inside the pause."""
    return WeightSync(
        parts.config.replace(weight_transfer="in_place"),
        parts.trainer,
        parts.inference.clients,
        engines_up=lambda: parts.servers.up,
        on_failure=parts.servers.close,
        on_report=lambda report: None,
        probe_token_ids=list(range(5, 37)),
    )


@contextlib.asynccontextmanager
async def load(parts: RunComponents, requests: int) -> AsyncIterator[None]:
    """Keeps `requests` requests in flight on every engine."""
    counter = iter(range(1 << 30))

    async def slot(client: Any) -> None:
        while True:
            name = f"load-{next(counter)}"
            await client.generate(GenerateRequest(name, [5 + i for i in range(24)], ANSWER_TOKENS, 1.0))

    tasks = [asyncio.create_task(slot(client)) for client in parts.inference.clients for _ in range(requests)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def clients_of(parts: RunComponents) -> list[EngineClient]:
    """Returns the clients of vLLM servers, which have more methods than those of other engines."""
    return [client for client in parts.inference.clients if isinstance(client, EngineClient)]


async def sampled(parts: RunComponents) -> int:
    """Returns the tokens that all engines have sampled so far."""
    return sum([(await metrics_of(client))["vllm:generation_tokens_total"] for client in clients_of(parts)])


async def measure_kind(parts: RunComponents, weights: WeightSync, shape: str, num_syncs: int) -> dict[str, Any]:
    """Returns medians over `num_syncs` syncs, after one that is not counted."""
    syncs: list[dict[str, float]] = []
    rates: dict[str, list[float]] = {"between": [], "during": []}
    metrics: dict[str, float] = {}
    for index in range(num_syncs + 1):
        before, settling = await sampled(parts), time.monotonic()
        await asyncio.sleep(SETTLE_SECONDS)
        tokens, started = await sampled(parts), time.monotonic()
        async with asyncio.timeout(SYNC_TIMEOUT_SECONDS):
            async with parts.trainer.queue:
                parts.trainer.version += 1  # as after a training step; the weights may be unchanged
            asked = time.monotonic()
            metrics = await weights.sync()
            ended = time.monotonic()
        after = await sampled(parts)
        if index == 0:
            continue
        rates["between"].append((tokens - before) / (started - settling))
        rates["during"].append((after - tokens) / (time.monotonic() - started))
        workers = [t for client in clients_of(parts) for t in await client.call_worker("telescope_sync_timings")]
        syncs.append(
            {
                "total": ended - asked,
                "stall": metrics["timing_weight_sync_trainer_total"],
                "pause": metrics["timing_weight_sync_inference_total"],
                "transfer": max(v for k, v in metrics.items() if k.startswith("weight_sync/transfer_seconds")),
                **{name: max(t.get(f"{name}_seconds", 0.0) for t in workers) for name in ("wait", "load", "swap")},
            }
        )
    medians = {name: statistics.median(sync[name] for sync in syncs) for name in NUMBERS}
    gigabytes = metrics["weight_sync/bytes"] / 1e9
    row = {
        "shape": shape,
        "engines": len(parts.inference.clients),
        "trainers": parts.config.trainer_num_workers,
        "background_servers": int(metrics["weight_sync/background"]),
        "gigabytes": round(gigabytes, 3),
        "median_seconds": {name: round(value, 4) for name, value in medians.items()},
        "worst_seconds": {name: round(max(sync[name] for sync in syncs), 4) for name in NUMBERS},
        "gigabytes_per_second": {
            name: round(gigabytes / medians[name], 1) for name in ("total", "transfer", "swap") if medians[name] > 0
        },
        "tokens_per_second": {name: round(statistics.median(values)) for name, values in rates.items()},
        "syncs": [{name: round(value, 4) for name, value in sync.items()} for sync in syncs],
    }
    print({name: value for name, value in row.items() if name != "syncs"}, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
