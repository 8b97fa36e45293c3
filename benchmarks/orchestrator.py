"""Measures the driver's CPU per sample and its event-loop lag.

    python benchmarks/orchestrator.py --quick                      256 and 1,024 samples in flight, once
    python benchmarks/orchestrator.py --json results.json          256, 1,024 and 4,096, three times each

Real: the loops, a rollout worker in the driver's process with its HTTP clients and environments, and the record, over
fake engines in separate processes that answer in vLLM's format. Fake: the trainer and the weights. Each case runs in a
fresh process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from command_line import command, parser_of, show, write_json
from driver_case import (
    GROUP_SIZE,
    LENGTH_SIGMA,
    MAX_TOKENS,
    MEAN_TOKENS,
    NUM_SERVERS,
    STEP_SECONDS,
    VLLM_VERSION,
    Case,
)
from fake_servers import VOCABULARY, save_tokenizer
from measure import provenance

FULL_SPEED_IN_FLIGHT = 4096
"""With more in flight each request is slower in proportion, as on a full engine: the same answers per second."""

AIM_CPU_MS = 1.0
AIM_LAG_P99_MS = 20.0

DESCRIPTION = f"""\
Measures the driver of a training run under load, on this machine, without a GPU.

Answers have a log-normal length with a mean of {MEAN_TOKENS} tokens (sigma {LENGTH_SIGMA}, cut at {MAX_TOKENS}). They
come at a fixed speed per request and are written as vLLM {VLLM_VERSION} writes them, about 140 bytes
a token; the fake engine has the middlewares of a real server, of which the last packs an answer
as arrays, unless --answers json. Groups of {GROUP_SIZE}, a batch of an eighth of what
is in flight, a training step of {STEP_SECONDS} s, a weight sync after each."""

EPILOG = f"""\
columns
  answers     what the driver receives, see --answers
  actual      mean samples in flight over the measured time; if far below the first column, the
              machine could not sustain the load and the row means little
  driver      CPU of the driver process, all threads, per finished sample and per 1,000 tokens
              (aim: {AIM_CPU_MS:g} ms with 4,096 in flight)
  loop        the part of it that ran on the event loop's thread
  recorder    the part of it that ran on the recorder's thread
  reference   CPU of a fixed piece of work (reading one answer of {MEAN_TOKENS:,} tokens as JSON) at the end of
              the case: shows how other load on the machine affects all CPU times of the row
  lag         how late the loop ran due callbacks, at evenly spaced points in time
              (aim: p99 {AIM_LAG_P99_MS:g} ms); includes waiting for a core, so run it on an idle machine
  turns       the same from the CPU of the loop's own thread alone: the lag on an otherwise idle
              core (--loop asyncio only)
  samples/s   follows from the load (samples in flight x speed / length): it shows that the load
              was sustained, not the driver's maximum
  cores       CPU of the driver per second
  RSS         peak of the driver

examples
  python benchmarks/orchestrator.py --quick
  python benchmarks/orchestrator.py --json benchmarks/results/orchestrator.json
  python benchmarks/orchestrator.py --in-flight 4096 --answers arrays json
  python benchmarks/orchestrator.py --in-flight 16384 --repeats 1
"""


def cases_of(arguments: argparse.Namespace, tokenizer: str, end_token: int) -> Iterator[Case]:
    """Yields the cases to measure, in order."""
    for in_flight, answers, loop in itertools.product(arguments.in_flight, arguments.answers, arguments.loop):
        speed = arguments.tokens_per_second * min(1.0, FULL_SPEED_IN_FLIGHT / in_flight)
        # Long enough that starts and ends no longer come in waves: one and a half answers of mean length.
        warm_up = 1.5 * MEAN_TOKENS / speed
        yield Case(in_flight, speed, warm_up, arguments.seconds, tokenizer, end_token, answers, loop)


def run_case(case: Case) -> dict[str, Any]:
    """Measures in a fresh process, so that cases do not affect each other."""
    words = [sys.executable, str(Path(__file__).with_name("driver_case.py")), json.dumps(asdict(case))]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    what = f"{case.in_flight} in flight, {case.answers}, {case.loop}"
    if done.returncode != 0:
        raise RuntimeError(f"the case with {what} failed; see its error above")
    result = dict(json.loads(done.stdout.splitlines()[-1]))
    print(f"{what}: {result['driver_ms']:.2f} ms a sample, lag p99 {result['lag_p99_ms']:.1f} ms", file=sys.stderr)
    return result


def run_cases(cases: Sequence[Case], arguments: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Returns the repeats of every case; `--at-once` of them run simultaneously, each on its own cores."""
    free: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()
    for cores in shares_of_cores(arguments.at_once):
        free.put(cores)

    def run(case: Case) -> dict[str, Any]:
        cores = free.get()
        try:
            return run_case(replace(case, cores=cores))
        finally:
            free.put(cores)

    with ThreadPoolExecutor(arguments.at_once) as threads:
        # One repeat of each case before the next, so that a change of the machine's load affects all of them.
        runs = list(threads.map(run, [case for _ in range(arguments.repeats) for case in cases]))
    return [runs[index :: len(cases)] for index in range(len(cases))]


def shares_of_cores(count: int) -> list[tuple[int, ...]]:
    """Splits this process's cores into `count` equal shares; one share is no limit."""
    if count == 1:
        return [()]
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // count
    return [tuple(cores[size * index : size * (index + 1)]) for index in range(count)]


COLUMNS = (
    ("in flight", "in_flight", "{:,.0f}"),
    ("answers", "answers", "{}"),
    ("loop", "loop", "{}"),
    ("actual", "in_flight_mean", "{:,.0f}"),
    ("driver ms", "driver_ms", "{:.2f}"),
    ("per 1,000 tokens", "driver_ms_per_1000_tokens", "{:.2f}"),
    ("loop ms", "loop_ms", "{:.2f}"),
    ("recorder ms", "recorder_ms", "{:.2f}"),
    ("reference ms", "reference_ms", "{:.2f}"),
    ("lag p50 ms", "lag_p50_ms", "{:.1f}"),
    ("p99", "lag_p99_ms", "{:.1f}"),
    ("max", "lag_max_ms", "{:.0f}"),
    ("turns p99", "turns_p99_ms", "{:.1f}"),
    ("samples/s", "samples_per_second", "{:.0f}"),
    ("tokens", "tokens_per_sample", "{:,.0f}"),
    ("cores", "driver_cores", "{:.2f}"),
    ("RSS MiB", "rss_mib", "{:.0f}"),
)


def median_of(case: Case, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median of every number over repeats, with the repeats."""
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    named = {
        "in_flight": case.in_flight, "answers": case.answers, "loop": case.loop,
        "tokens_per_second": case.tokens_per_second,
    }  # fmt: skip
    return {**named, **medians, "runs": list(runs)}


def parse() -> argparse.Namespace:
    parser = parser_of(DESCRIPTION, "256 and 1024 in flight, once, 10 s each, at double speed", EPILOG)
    add = parser.add_argument
    unit = GROUP_SIZE * NUM_SERVERS
    add("--in-flight", type=int, nargs="+", metavar="N",
        help=f"samples in flight, each a multiple of {unit} (default: 256 1024 4096)")  # fmt: skip
    add("--answers", nargs="+", choices=("arrays", "json"), default=["arrays"],
        help="what the driver receives: binary responses of the server, or vLLM's JSON "
        "(default: arrays)")  # fmt: skip
    add("--loop", nargs="+", choices=("uvloop", "asyncio"), default=["asyncio"],
        help="event loop of the driver; a run uses Python's own (default: asyncio)")  # fmt: skip
    add("--seconds", type=float, default=40.0, help="measured seconds of each repeat (default: 40)")
    add("--tokens-per-second", type=float, default=50.0, metavar="S",
        help="speed of each request; at 50, one of 1,000 tokens takes 20 s (default: 50), and with more than "
        f"{FULL_SPEED_IN_FLIGHT:,} in flight it is lower in proportion")  # fmt: skip
    add("--repeats", type=int, default=3, help="fresh processes a case, of which the median counts (default: 3)")
    add("--at-once", type=int, default=1, metavar="N",
        help="measure N at the same time, each on its share of the cores, of which each should have three (default: 1)"
        )  # fmt: skip
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.seconds = 1, 10.0
        arguments.tokens_per_second *= 2
        arguments.in_flight = arguments.in_flight or [256, 1024]
    arguments.in_flight = arguments.in_flight or [256, 1024, 4096]
    if wrong := [n for n in arguments.in_flight if n <= 0 or n % unit]:
        parser.error(f"--in-flight {wrong[0]}: use a positive multiple of {unit}, whole groups on every server")
    if not 1 <= arguments.at_once <= len(os.sched_getaffinity(0)):
        parser.error(f"--at-once {arguments.at_once}: use 1 to {len(os.sched_getaffinity(0))}, the number of cores")
    return arguments


def main() -> int:
    arguments = parse()
    made = provenance(["msgspec", "numpy", "pyarrow", "uvloop"])
    with tempfile.TemporaryDirectory(prefix="telescope-benchmark-") as folder:
        cases = list(cases_of(arguments, folder, save_tokenizer(Path(folder))))
        runs = run_cases(cases, arguments)
    results = [median_of(case, repeats) for case, repeats in zip(cases, runs, strict=True)]
    show(
        [title for title, _, _ in COLUMNS],
        [[form.format(result[name]) if name in result else "" for _, name, form in COLUMNS] for result in results],
        "The driver under load (medians; CPU is per finished sample)", texts=0, width=150,
    )  # fmt: skip
    report = {
        "benchmark": "orchestrator",
        "command": command(),
        "provenance": made,
        "settings": {
            "group_size": GROUP_SIZE, "servers": NUM_SERVERS, "mean_tokens": MEAN_TOKENS,
            "length_sigma": LENGTH_SIGMA, "max_tokens": MAX_TOKENS, "vocabulary": VOCABULARY,
            "vllm_format": VLLM_VERSION, "tokens_per_second_of_a_request": arguments.tokens_per_second,
            "seconds": arguments.seconds,
        },
        "repeats": arguments.repeats,
        "at_once": arguments.at_once,
        "results": results,
    }  # fmt: skip
    write_json(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
