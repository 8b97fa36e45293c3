"""Gauges and log lines of the generated run: two machines with four GPUs each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from telescope import __version__
from telescope.record.log_files import process_of
from telescope.testing.demo_run.curves import Curves
from telescope.testing.demo_run.steps import NUM_RANKS, NUM_SERVERS, Step
from telescope.testing.demo_run.tasks import TASKS

NODES = ("gpu-node-1", "gpu-node-2")
TOPOLOGY = {
    "driver": NODES[0],
    **{f"inference server {server}": f"{NODES[0]}, GPU {server}" for server in range(NUM_SERVERS)},
    **{f"trainer rank {rank}": f"{NODES[1]}, GPU {rank}" for rank in range(NUM_RANKS)},
}

VERSIONS = {
    "python": "3.12.11", "telescope": __version__, "torch": "2.11.0+cu130", "vllm": "0.26.0", "ray": "2.56.0",
    "transformers": "5.17.0",
}  # fmt: skip

GIB = 2**30

Row = dict[str, Any]
Levels = dict[str, tuple[float, float]]
"""Lowest and highest value by the name of a gauge."""

ORCHESTRATOR: Levels = {
    "event_loop_lag_seconds": (0.0004, 0.0024), "lanes_used": (24, 32), "groups_open": (3, 6), "groups_ready": (0, 3),
    "tokens_per_second": (900, 1500),
}  # fmt: skip
HOST: Levels = {
    "cpu_utilization_percent": (18, 31), "load_average_1m": (9, 14), "memory_used_bytes": (112 * GIB, 115 * GIB),
    "memory_total_bytes": (1024 * GIB, 1024 * GIB), "shared_memory_used_bytes": (6 * GIB, 7 * GIB),
    "swap_used_bytes": (0, 0), "disk_free_bytes": (1830 * GIB, 1840 * GIB),
    "disk_total_bytes": (3500 * GIB, 3500 * GIB),
}  # fmt: skip
ENGINE: Levels = {
    "vllm:num_requests_running": (5, 8), "vllm:num_requests_waiting": (0, 1), "vllm:kv_cache_usage_perc": (0.03, 0.09),
    "vllm:num_preemptions_total": (0, 0),
}  # fmt: skip

HOST_RATES = {"network_sent_bytes": 3.5e8, "network_received_bytes": 3.4e8}
"""Growth of counters in a second."""
ENGINE_RATES = {
    "vllm:generation_tokens_total": 340.0, "vllm:prompt_tokens_total": 226.0, "vllm:prefix_cache_queries_total": 226.0,
    "vllm:prefix_cache_hits_total": 142.0, "vllm:time_to_first_token_seconds_sum": 0.23,
    "vllm:time_to_first_token_seconds_count": 3.8, "vllm:e2e_request_latency_seconds_sum": 3.4,
    "vllm:e2e_request_latency_seconds_count": 3.8, "telescope:engine_busy_seconds_total": 0.92,
    "telescope:engine_clock_seconds": 1.0,
}  # fmt: skip


def gauges_at(curves: Curves, origin: float, time: float, step: int) -> Iterator[Row]:
    """Yields the rows of `gauges` at a time within a step."""
    draw = np.random.default_rng(int(time * 1000))
    seconds = time - origin
    waiting = seconds - curves.start(step) < curves.wait(step)

    def rows(at: Row, levels: Levels, rates: dict[str, float] | None = None, phase: float = 0.0) -> Iterator[Row]:
        values = {name: draw.uniform(low, high) for name, (low, high) in levels.items()}
        for place, (name, rate) in enumerate((rates or {}).items()):
            # A counter always grows, now faster and now slower.
            values[name] = rate * (seconds + 4 * math.sin(seconds / 20 + phase + 0.3 * place))
        for name, value in values.items():
            yield {"time": time, **at, "name": name, "value": float(max(0.0, value))}

    def gpu(node: str, number: int, load: float, memory: float) -> Iterator[Row]:
        levels: Levels = {
            "gpu_utilization_percent": (load, load), "gpu_memory_utilization_percent": (0.6 * load, 0.6 * load),
            "gpu_memory_used_bytes": (memory * GIB, memory * GIB), "gpu_memory_total_bytes": (80 * GIB, 80 * GIB),
            "gpu_power_watts": (120 + 5.2 * load, 132 + 5.2 * load),
            "gpu_temperature_celsius": (38 + 0.28 * load, 39 + 0.28 * load),
            "gpu_sm_clock_mhz": (1980, 1980) if load > 10 else (1410, 1410),
        }  # fmt: skip
        return rows({"component": "gpu", "node": node, "gpu": number}, levels)

    yield from rows({"component": "orchestrator"}, ORCHESTRATOR)
    for place, node in enumerate(NODES):
        yield from rows({"component": "host", "node": node}, HOST, HOST_RATES, place)
    for rank in range(NUM_RANKS):
        used = 31.0 if waiting else 47 + 6 * draw.random()
        yield from gpu(NODES[1], rank, draw.uniform(2, 9) if waiting else draw.uniform(88, 99), used + 14)
        memory = {"torch_memory_allocated_bytes": used * GIB, "torch_memory_reserved_bytes": 58 * GIB}
        at: Row = {"component": "trainer", "node": NODES[1], "gpu": rank, "rank": rank}
        yield from rows(at, {name: (value, value) for name, value in memory.items()})
    for server in range(NUM_SERVERS):
        down = curves.is_down(server, step)
        yield from gpu(NODES[0], server, 0.0 if down else draw.uniform(82, 98), 5.0 if down else 70.5)
        if not down:
            at = {"component": "inference", "node": NODES[0], "gpu": server, "server": server}
            yield from rows(at, ENGINE, ENGINE_RATES, server)


def given_gpus(time: float) -> Iterator[Row]:
    """Yields the rows that say which process has which GPU."""
    for component, key, node, count in (
        ("trainer", "rank", NODES[1], NUM_RANKS), ("inference", "server", NODES[0], NUM_SERVERS),
    ):  # fmt: skip
        for number in range(count):
            row = {"time": time, "name": "gpu_given", "gpu": number, "value": 1.0}
            yield {**row, "component": component, "node": node, key: number}


TRACEBACK = """reward of sample {sample} failed
Traceback (most recent call last):
  File "environments/countdown/environment.py", line 131, in compute_reward
    expression = parse(found.group(1))
  File "environments/countdown/puzzles.py", line 204, in parse
    raise ExpressionError(message)
telescope.environments.countdown.puzzles.ExpressionError: unexpected '=' at 7"""


def start_logs(origin: float) -> Iterator[Row]:
    """Yields the log lines from before the first step."""
    yield log_line(origin - 58, f"loading environments {', '.join(TASKS)}", place="telescope.orchestrator.run:112")
    for server in range(NUM_SERVERS):
        yield log_line(origin - 41 + server, "Model weights took 3.2 GiB", f"inference-{server}", "model_runner.py:512")
    for rank in range(NUM_RANKS):
        text = f"rank {rank} of {NUM_RANKS} has its shards"
        yield log_line(origin - 24, text, f"trainer-{rank}", "telescope.trainer.worker:96")
    text = "weights of version 0 verified on 4 servers: 311 of 311 tensors loaded as sent"
    yield log_line(origin - 6, text, place="telescope.orchestrator.weight_sync:336")


def step_logs(made: Step, draw: np.random.Generator) -> Iterator[Row]:
    """Yields the log lines of a step, in the order of their times."""
    number, failed = made.number, [one for group in made.groups for one in group.samples if one.failure_kind]
    if number % 4 == 0:
        text = (
            f"Engine 000: Avg prompt throughput: {draw.uniform(150, 260):.1f} tokens/s, Avg generation throughput: "
            f"{draw.uniform(280, 400):.1f} tokens/s, Running: {draw.integers(5, 9)} reqs, Waiting: 0 reqs, "
            f"GPU KV cache usage: {draw.uniform(3, 9):.1f}%, Prefix cache hit rate: {draw.uniform(55, 70):.1f}%"
        )
        yield log_line(made.start + 0.4, text, f"inference-{number // 4 % NUM_SERVERS}", "loggers.py:259")
    for sample in failed[:1]:
        text = TRACEBACK.format(sample=sample.sample_id)
        yield log_line(sample.finished_at, text, "environment-0", "telescope.environments.user_code:88", "WARNING")
    if number % 10 == 9:
        metrics = made.result.metrics
        text = f"step {number}: {metrics['tokens/trained']:.0f} tokens, gradient norm {metrics['grad_norm']:.3f}"
        yield log_line(made.end - 0.2, text, "trainer-0", "telescope.trainer.worker:171")


def log_line(
    time: float, message: str, process: str = "driver", place: str = "telescope.orchestrator.status:113",
    level: str = "INFO",
) -> Row:  # fmt: skip
    """Returns a row of `logs`."""
    row = {"time": time, "level": level, "message": message, "process": 4000 + len(process) * 7, "place": place}
    return {**row, **process_of(f"{process}.log")}
