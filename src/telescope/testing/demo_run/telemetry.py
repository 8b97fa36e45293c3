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


class Gauges:
    """Readings of a run, a moment at a time. Counters grow with the time since the last one."""

    def __init__(self, curves: Curves, origin: float) -> None:
        self._curves = curves
        self._origin = origin
        self._before: float | None = None
        self._totals: dict[tuple[str, int], float] = {}

    def at(self, time: float, step: int) -> Iterator[Row]:
        """Yields the rows of `gauges` at a time within a step."""
        draw = np.random.default_rng(int(time * 1000))
        seconds = 0.0 if self._before is None else time - self._before
        self._before = time
        waiting = time - self._origin - self._curves.start(step) < self._curves.wait(step)
        yield from self._host(time, draw, seconds)
        for rank in range(NUM_RANKS):
            load = draw.uniform(2, 9) if waiting else draw.uniform(88, 99)
            yield from _gpu(time, NODES[1], rank, load, 61 + 2 * draw.random(), draw)
            at = {"time": time, "component": "trainer", "node": NODES[1], "gpu": rank, "rank": rank}
            used = (31 if waiting else 47 + 6 * draw.random()) * GIB
            yield {**at, "name": "torch_memory_allocated_bytes", "value": used}
            yield {**at, "name": "torch_memory_reserved_bytes", "value": 58.0 * GIB}
        for server in range(NUM_SERVERS):
            down = self._curves.is_down(server, step)
            load = 0.0 if down else draw.uniform(82, 98)
            yield from _gpu(time, NODES[0], server, load, 5.0 if down else 70.5, draw)
            if not down:
                yield from self._engine(time, server, step, draw, seconds)
        orchestrator = {
            "event_loop_lag_seconds": 0.0004 + 0.002 * draw.random(), "lanes_used": float(draw.integers(24, 33)),
            "groups_open": float(draw.integers(3, 7)), "groups_ready": float(draw.integers(0, 4)),
            "tokens_per_second": draw.uniform(900, 1500),
        }  # fmt: skip
        for name, value in orchestrator.items():
            yield {"time": time, "name": name, "component": "orchestrator", "value": value}

    def _host(self, time: float, draw: np.random.Generator, seconds: float) -> Iterator[Row]:
        for place, node in enumerate(NODES):
            hours = (time - self._origin) / 3600
            values = {
                "cpu_utilization_percent": draw.uniform(18, 31) - 6 * place, "load_average_1m": draw.uniform(9, 14),
                "memory_used_bytes": (112 + 3 * hours + draw.random()) * GIB, "memory_total_bytes": 1024.0 * GIB,
                "network_sent_bytes": self._total("sent", place, seconds * draw.uniform(2e8, 5e8)),
                "network_received_bytes": self._total("received", place, seconds * draw.uniform(2e8, 5e8)),
                "shared_memory_used_bytes": (6 + draw.random()) * GIB, "swap_used_bytes": 0.0,
            }  # fmt: skip
            if place == 0:
                values |= {"disk_free_bytes": (1840 - 6 * hours) * GIB, "disk_total_bytes": 3500.0 * GIB}
            for name, value in values.items():
                yield {"time": time, "name": name, "component": "host", "node": node, "value": float(value)}

    def _engine(self, time: float, server: int, step: int, draw: np.random.Generator, seconds: float) -> Iterator[Row]:
        tokens = seconds * draw.uniform(280, 400)
        requests = tokens / 90
        values = {
            "vllm:num_requests_running": float(draw.integers(5, 9)),
            "vllm:num_requests_waiting": float(draw.random() < 0.1),
            "vllm:kv_cache_usage_perc": draw.uniform(0.03, 0.09), "vllm:num_preemptions_total": 0.0,
            "vllm:generation_tokens_total": self._total("generated", server, tokens),
            "vllm:prompt_tokens_total": self._total("prompts", server, requests * 60),
            "vllm:prefix_cache_queries_total": self._total("queries", server, requests * 60),
            "vllm:prefix_cache_hits_total": self._total("hits", server, requests * 60 * draw.uniform(0.55, 0.7)),
            "vllm:time_to_first_token_seconds_sum": self._total("ttft", server, requests * draw.uniform(0.04, 0.08)),
            "vllm:time_to_first_token_seconds_count": self._total("ttft_count", server, requests),
            "vllm:e2e_request_latency_seconds_sum": self._total("e2e", server, requests * draw.uniform(0.7, 1.1)),
            "vllm:e2e_request_latency_seconds_count": self._total("e2e_count", server, requests),
            "telescope:engine_busy_seconds_total": self._total("busy", server, seconds * draw.uniform(0.86, 0.98)),
            "telescope:engine_clock_seconds": self._total("clock", server, seconds),
        }  # fmt: skip
        at = {"time": time, "component": "inference", "node": NODES[0], "gpu": server, "server": server}
        for name, value in values.items():
            yield {**at, "name": name, "value": float(value)}

    def _total(self, name: str, owner: int, growth: float) -> float:
        self._totals[name, owner] = self._totals.get((name, owner), 0.0) + growth
        return self._totals[name, owner]


def _gpu(time: float, node: str, gpu: int, load: float, memory: float, draw: np.random.Generator) -> Iterator[Row]:
    values = {
        "gpu_utilization_percent": load, "gpu_memory_utilization_percent": 0.6 * load,
        "gpu_memory_used_bytes": memory * GIB, "gpu_memory_total_bytes": 80.0 * GIB,
        "gpu_power_watts": 120 + 5.2 * load + 12 * draw.random(), "gpu_temperature_celsius": 38 + 0.28 * load,
        "gpu_sm_clock_mhz": 1980.0 if load > 10 else 1410.0,
    }  # fmt: skip
    for name, value in values.items():
        yield {"time": time, "name": name, "component": "gpu", "node": node, "gpu": gpu, "value": float(value)}


def given_gpus(time: float) -> Iterator[Row]:
    """Yields the rows that say which process has which GPU."""
    for number in range(NUM_RANKS):
        row = {"time": time, "name": "gpu_given", "gpu": number, "value": 1.0}
        yield {**row, "component": "trainer", "node": NODES[1], "rank": number}
    for number in range(NUM_SERVERS):
        row = {"time": time, "name": "gpu_given", "gpu": number, "value": 1.0}
        yield {**row, "component": "inference", "node": NODES[0], "server": number}


TRACEBACK = """reward of sample {sample} failed
Traceback (most recent call last):
  File "environments/countdown/environment.py", line 131, in compute_reward
    expression = parse(found.group(1))
  File "environments/countdown/puzzles.py", line 204, in parse
    raise ExpressionError(message)
telescope.environments.countdown.puzzles.ExpressionError: unexpected '=' at 7"""


def start_logs(origin: float) -> Iterator[Row]:
    """Yields the log lines from before the first step."""
    lines = [
        (-58, "INFO", "driver", "telescope.orchestrator.run:112", f"loading environments {', '.join(TASKS)}"),
        (-49, "INFO", "driver", "telescope.cluster.ray_cluster:188", f"Ray runs on {len(NODES)} nodes with 8 GPUs"),
        *((-41 + server, "INFO", f"inference-{server}", "model_runner.py:512", "Model weights took 3.2 GiB")
          for server in range(NUM_SERVERS)),
        *((-30 + server, "INFO", f"inference-{server}", "kv_cache_utils.py:1087", "GPU KV cache size: 611,232 tokens")
          for server in range(NUM_SERVERS)),
        *((-24, "INFO", f"trainer-{rank}", "telescope.trainer.worker:96", f"rank {rank} of {NUM_RANKS} has its shards")
          for rank in range(NUM_RANKS)),
        (-6, "INFO", "driver", "telescope.orchestrator.weight_sync:336",
         "weights of version 0 verified on 4 servers: 311 of 311 tensors loaded as sent"),
    ]  # fmt: skip
    for seconds, level, process, place, message in lines:
        yield _line(origin + seconds, level, process, place, message)


def step_logs(made: Step, draw: np.random.Generator) -> Iterator[Row]:
    """Yields the log lines of a step."""
    number = made.number
    if number % 4 == 0:
        server = (number // 4) % NUM_SERVERS
        text = (
            f"Engine 000: Avg prompt throughput: {draw.uniform(150, 260):.1f} tokens/s, Avg generation throughput: "
            f"{draw.uniform(280, 400):.1f} tokens/s, Running: {draw.integers(5, 9)} reqs, Waiting: 0 reqs, "
            f"GPU KV cache usage: {draw.uniform(3, 9):.1f}%, Prefix cache hit rate: {draw.uniform(55, 70):.1f}%"
        )
        yield _line(made.start + 0.4, "INFO", f"inference-{server}", "loggers.py:259", text)
    if number % 10 == 9:
        norm = made.result.metrics["grad_norm"]
        shown = f"{norm:.3f}" if math.isfinite(norm) else "nan"
        text = f"step {number}: {made.result.metrics['tokens/trained']:.0f} tokens, gradient norm {shown}"
        yield _line(made.end - 0.2, "INFO", "trainer-0", "telescope.trainer.worker:171", text)
    failed = [sample for group in made.groups for sample in group.samples if sample.failure_kind]
    for sample in failed[:1]:
        yield _line(sample.finished_at, "WARNING", "environment-0", "telescope.environments.user_code:88",
                    TRACEBACK.format(sample=sample.sample_id))  # fmt: skip


def _line(time: float, level: str, process: str, place: str, message: str) -> Row:
    row = {"time": time, "level": level, "message": message, "process": 4000 + len(process) * 7, "place": place}
    return {**row, **process_of(f"{process}.log")}
