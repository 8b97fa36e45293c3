"""One case of `orchestrator.py`: a run with a given number of samples in flight, in its own process.

python benchmarks/driver_case.py '{"in_flight": 256, ...}'    # the fields of `Case`; prints a line of JSON
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_servers import SECRET, VOCABULARY, ServerProcess, fake_servers
from measure import (
    LagMeter,
    TimedSelector,
    cpu_seconds,
    cpu_seconds_of,
    lag_numbers,
    lag_of_turns,
    peak_rss_mib,
    sleep_beside,
)  # fmt: skip
from tests.fakes.app import AnswerWriter
from tests.fakes.client import ask_for_json
from tests.fakes.engine import FakeEngineSettings, FakeRequest
from tests.fakes.run import FakeRun, FakeTrainer, fake_run

from telescope.config import TelescopeConfig
from telescope.inference.client import EngineClient
from telescope.inference.vllm.adapter import read_generate
from telescope.orchestrator.supervision import Supervisor

GROUP_SIZE = 16
NUM_SERVERS = 2
MEAN_TOKENS = 1000
LENGTH_SIGMA = 0.8
MAX_TOKENS = 8192
CONTEXT = 16_384
STEP_SECONDS = 0.2
OPEN_GROUPS_PER_SLOT = 8
"""Window in groups per group's worth of request slots: wide enough that only the slots limit what is in flight."""
VLLM_VERSION = "0.32.0"

FILL_SECONDS = 300.0
"""Time limit for filling all request slots; takes seconds on an idle machine."""


@dataclass(frozen=True)
class Case:
    """One measurement. Times in seconds."""

    in_flight: int
    tokens_per_second: float
    warm_up: float
    seconds: float
    tokenizer: str
    end_token: int
    answers: str
    """`arrays`: the server sends binary responses, as a real one does. `json`: the driver reads vLLM's own JSON."""
    loop: str
    """`uvloop`, or `asyncio`, whose iterations can be measured."""
    cores: Sequence[int] = ()
    """Cores for the driver, and its engines; empty: all."""


def config_of(case: Case) -> TelescopeConfig:
    """Returns a config in which request slots, not the async window, limit what is in flight."""
    groups = case.in_flight // GROUP_SIZE
    batch = max(2, groups // 8)
    return TelescopeConfig.model_validate(
        {
            "model": case.tokenizer,
            "environments": [{"name": "coin"}],
            "environments_path": [str(Path(__file__).parent / "environments")],
            "group_size": GROUP_SIZE,
            "prompts_batch_size_for_trainer": batch,
            # A group is open until its longest answer, several times as long as a slot is in use.
            "max_async_rollout": OPEN_GROUPS_PER_SLOT * groups // batch,
            "max_off_policy_steps": 1000,  # checked at every sync, and never a reason to discard a sample
            "max_concurrent_prompts_per_server": groups // NUM_SERVERS,
            "inference_num_workers": NUM_SERVERS,
            "trainer_num_workers": 2,
            "number_of_steps": 100_000,
            "max_tokens": MAX_TOKENS,
            "max_model_len": CONTEXT,
            "seq_len": CONTEXT,
            "use_wandb": False,
        }
    )


@asynccontextmanager
async def started(case: Case, folder: Path) -> AsyncIterator[tuple[FakeRun, list[ServerProcess]]]:
    """Yields a wired run with its servers and clients."""
    settings = FakeEngineSettings(
        mean_tokens=MEAN_TOKENS,
        length_sigma=LENGTH_SIGMA,
        tokens_per_second=case.tokens_per_second,
        max_model_len=CONTEXT,
        vocabulary=VOCABULARY,
        end_token=case.end_token,
        vllm_version=VLLM_VERSION,
    )
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(fake_servers(NUM_SERVERS, settings))
        clients = [EngineClient(s.url, SECRET, index) for index, s in enumerate(servers)]
        for client in clients:
            if case.answers != "arrays":
                ask_for_json(client)
            stack.push_async_callback(client.close)
        trainer = FakeTrainer(seconds=STEP_SECONDS, keep=False)
        run = await stack.enter_async_context(fake_run(config_of(case), folder, servers, [*clients], trainer=trainer))
        yield run, servers


async def measure(case: Case, turns: TimedSelector | None) -> dict[str, Any]:
    """Runs one case and returns its numbers. `turns` is the selector of asyncio's loop, if used."""
    with tempfile.TemporaryDirectory(prefix="telescope-benchmark-") as folder:
        async with started(case, Path(folder)) as (run, servers):
            supervisor = Supervisor()
            supervisor.spawn(run.servers.watch(), "server watch")
            training = asyncio.create_task(supervisor.run_until(run.orchestrator.run(supervisor)))
            try:
                return await _observe(case, run, servers, training, turns)
            finally:
                training.cancel()
                await asyncio.wait([training])


async def _observe(
    case: Case, run: FakeRun, servers: list[ServerProcess], training: asyncio.Task[Any], turns: TimedSelector | None
) -> dict[str, Any]:
    lag = LagMeter()
    filled_by = time.monotonic() + FILL_SECONDS
    while run.slots.num_used < 0.95 * case.in_flight:
        await sleep_beside(training, 0.25)
        if time.monotonic() > filled_by:
            raise RuntimeError(
                f"only {run.slots.num_used} samples in flight after {FILL_SECONDS:g} s: {run.status.components}"
            )
    await sleep_beside(training, case.warm_up)
    start_lags = lag.take()
    if turns is not None:
        turns.take()
    pids = [server.pid for server in servers]
    before = cpu_seconds() | {"engines": cpu_seconds_of(pids)}
    samples, tokens, steps = run.status.num_samples_finished, run.status.num_tokens_generated, run.status.step
    started_at, in_flight = time.monotonic(), []
    while time.monotonic() < started_at + case.seconds:
        await sleep_beside(training, 0.25)
        in_flight.append(run.slots.num_used)
    seconds = time.monotonic() - started_at
    after = cpu_seconds() | {"engines": cpu_seconds_of(pids)}
    lags, (turn_seconds, turned) = lag.take(), turns.take() if turns is not None else ([], seconds)
    lag.stop()
    samples, tokens = run.status.num_samples_finished - samples, run.status.num_tokens_generated - tokens
    if samples == 0:
        raise RuntimeError(f"no sample finished within {seconds:.0f} s; the run: {run.status.components}")
    ms = {name: 1000 * (after[name] - before.get(name, 0.0)) / samples for name in after}
    return {
        "driver_ms": ms["driver"],
        "driver_ms_per_1000_tokens": ms["driver"] * 1000 * samples / tokens,
        "loop_ms": ms["thread:loop"],
        "recorder_ms": ms.get("thread:telescope-recorder", 0.0),
        "engines_ms": ms["engines"],
        "driver_cores": (after["driver"] - before["driver"]) / seconds,
        "reference_ms": 1000 * reference_seconds(),
        **lag_numbers(lags, start_lags),
        "samples": samples,
        "samples_per_second": samples / seconds,
        "tokens_per_sample": tokens / samples,
        "steps": run.status.step - steps,
        "in_flight_mean": statistics.mean(in_flight),
        "masked": run.status.num_masked_samples,
        "rows_dropped": sum(run.recorder.dropped.values()),
        "rss_mib": peak_rss_mib(),
        "seconds": seconds,
    } | (
        {
            "turns_p99_ms": 1000 * lag_of_turns(turn_seconds, turned, 0.99),
            "turns_max_ms": 1000 * max(turn_seconds),
            "turns_per_second": len(turn_seconds) / turned,
        }
        if turn_seconds
        else {}
    )


def reference_seconds() -> float:
    """Returns CPU seconds for parsing one answer of `MEAN_TOKENS` tokens as JSON now: a measure of the machine's other
    load, since neighbors on its caches and cores make the same work slower."""
    settings = FakeEngineSettings(vocabulary=VOCABULARY, end_token=None, vllm_version=VLLM_VERSION)
    answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    request = FakeRequest("reference", [1], MEAN_TOKENS, 1, 0, None, answered, total=MEAN_TOKENS, produced=MEAN_TOKENS)
    request.versions = [("1", 0)]
    body = AnswerWriter(settings).write(request, "length")
    seconds = []
    for _ in range(100):
        started = time.thread_time()
        read_generate(body)
        seconds.append(time.thread_time() - started)
    return statistics.median(seconds)


def run_case(case: Case) -> dict[str, Any]:
    """Runs `measure` on the event loop and the cores of the case."""
    if case.cores:
        os.sched_setaffinity(0, case.cores)
    if case.loop == "uvloop":
        import uvloop  # not everywhere

        turns = None
        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    else:
        turns = TimedSelector()
        factory = functools.partial(asyncio.SelectorEventLoop, turns)
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(measure(case, turns))


if __name__ == "__main__":
    print(json.dumps(run_case(Case(**json.loads(sys.argv[1])))))
