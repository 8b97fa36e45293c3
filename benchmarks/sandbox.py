"""Measures sandboxes of a provider: start, commands a second, many creates, and what killed processes leave.

    python benchmarks/sandbox.py                       local, 1,000 creates
    python benchmarks/sandbox.py --quick               100 creates
    python benchmarks/sandbox.py --provider docker --json results.json

Leaks are counted by asking the provider for the label of the run, after `reap` for a provider in the cloud.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from command_line import parser_of, show, write_json
from measure import provenance

from telescope.sandbox import GenericSandboxPool, SandboxConfig, SandboxProvider, get_provider
from telescope.sandbox.ledger import DIRECTORY_VARIABLE, SandboxLedger, reap

LABEL = f"benchmark-{os.getpid()}"
CONFIG = SandboxConfig(memory_mb=256, disk_size_gb=0.05, timeout_seconds=600, extra={"run": LABEL})
TARGET_START_MS = 20.0
TARGET_COMMANDS = 500.0
NUM_ALIVE = 64
SETTLE_SECONDS = 20.0
RUNNING = 8
"""Sandboxes in which commands run at the same time."""


async def start_times(provider: SandboxProvider, count: int) -> list[float]:
    """Returns the seconds of creating, one after the other."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        handle = await provider.create(CONFIG)
        times.append(time.perf_counter() - began)
        await provider.destroy(handle)
    return times


async def commands_per_second(provider: SandboxProvider, count: int) -> float:
    """Runs `true` in `RUNNING` sandboxes, `count` times in each."""
    handles = await asyncio.gather(*(provider.create(CONFIG) for _ in range(RUNNING)))
    began = time.perf_counter()

    async def run(index: int) -> None:
        for _ in range(count):
            await provider.execute(handles[index], "true")

    await asyncio.gather(*(run(index) for index in range(RUNNING)))
    seconds = time.perf_counter() - began
    await provider.bulk_destroy(handles)
    return RUNNING * count / seconds


async def many_creates(provider: SandboxProvider, count: int, at_once: int) -> float:
    """Returns sandboxes a second that are created, used and destroyed."""
    free = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with free:
            handle = await provider.create(CONFIG)
            await provider.execute(handle, "true")
            await provider.destroy(handle)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return count / (time.perf_counter() - began)


async def hold(name: str) -> None:
    """Keeps `NUM_ALIVE` sandboxes of a pool alive with a command in each, until it is killed."""
    config = replace(CONFIG, extra={"run": SandboxLedger.of_process().run})
    pool = GenericSandboxPool(get_provider(name), config, NUM_ALIVE, max_concurrent_creates=32)
    await pool.start()
    handles = [await pool.acquire() for _ in range(NUM_ALIVE)]
    print("alive", flush=True)
    await asyncio.gather(*(pool.provider.execute(handle, "sleep 600", timeout=600) for handle in handles))


async def left_after_a_kill(name: str, folder: Path) -> dict[str, Any]:
    """Kills a process with sandboxes. Returns how many were alive, and are left before and after `reap`."""
    os.environ[DIRECTORY_VARIABLE] = str(folder)
    process = subprocess.Popen([sys.executable, __file__, "--hold", name], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "alive\n"
    provider, label = get_provider(name), SandboxLedger(folder).run
    alive = len(await provider.find(label))
    began = time.monotonic()
    process.send_signal(signal.SIGKILL)
    process.wait()
    while (left := len(await provider.find(label))) and time.monotonic() - began < SETTLE_SECONDS:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    seconds = time.monotonic() - began
    await reap(folder)
    return {"alive": alive, "left": left, "seconds": seconds, "left_after_reap": len(await provider.find(label))}


async def measure(name: str, quick: bool) -> dict[str, Any]:
    provider = get_provider(name)
    await start_times(provider, 3)
    times = await start_times(provider, 10 if quick else 50)
    with tempfile.TemporaryDirectory(prefix="telescope-sandboxes-") as folder:
        found = {
            "provider": name,
            "start_ms": {"median": statistics.median(times) * 1e3, "worst": max(times) * 1e3},
            "commands_per_second": await commands_per_second(provider, 20 if quick else 200),
            "creates_at_once_per_second": await many_creates(provider, 32, 32),
            "creates": 100 if quick else 1000,
            "creates_per_second": await many_creates(provider, 100 if quick else 1000, 32),
            "kill": await left_after_a_kill(name, Path(folder)),
        }
    found["left"] = len(await provider.find(LABEL))
    return found


def print_results(found: dict[str, Any]) -> None:
    start, kill = found["start_ms"], found["kill"]
    rows = [
        ("start, ms: median (worst)", f"{start['median']:.1f} ({start['worst']:.1f})", f"{TARGET_START_MS:g}"),
        (f"commands/s in {RUNNING} sandboxes", f"{found['commands_per_second']:.0f}", f"{TARGET_COMMANDS:g}"),
        ("32 creates at once: a second", f"{found['creates_at_once_per_second']:.0f}", ""),
        (
            f"{found['creates']} creates, 32 at once: a second",
            f"{found['creates_per_second']:.0f}; {found['left']} left", "0 left",
        ),
        (
            f"kill -9 with {kill['alive']} alive",
            f"{kill['left']} left after {kill['seconds']:.2f} s, {kill['left_after_reap']} after reap", "0 left",
        ),
    ]  # fmt: skip
    show(("what", "measured", "target"), rows, f"Sandboxes of {found['provider']}")


def main() -> None:
    parser = parser_of(__doc__, "100 creates instead of 1,000")
    parser.add_argument("--provider", default="local", help="name of a provider (default: local)")
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold:
        asyncio.run(hold(arguments.hold))
        return
    found = asyncio.run(measure(arguments.provider, arguments.quick))
    print_results(found)
    write_json(arguments.json, {**provenance(()), **found})


if __name__ == "__main__":
    main()
