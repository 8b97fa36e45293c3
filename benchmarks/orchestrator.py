"""What the driver costs per finished sample, and how late its event loop runs, with thousands of samples in flight.

    python benchmarks/orchestrator.py --quick

The real loops, lanes, HTTP clients, environment processes and record, against fake engines in processes of their own
that answer in vLLM's format. The trainer and the weights are stand-ins. Each case runs in a fresh process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fake_servers import SECRET, VOCABULARY, ServerProcess, fake_servers, save_tokenizer
from measure import LagMeter, TurnMeter, cpu_seconds, cpu_seconds_of, lag_of_turns, peak_rss_mib, percentile, provenance

from telescope.config import TelescopeConfig
from telescope.inference.client import EngineClient
from telescope.inference.fake_answers import AnswerWriter
from telescope.inference.fake_engine import FakeEngineSettings, FakeRequest
from telescope.inference.vllm_adapter import read_generate
from telescope.orchestrator.fake_run import FakeRun, FakeTrainer, fake_run
from telescope.orchestrator.supervise import Supervisor

GROUP_SIZE = 16
NUM_SERVERS = 2
MEAN_TOKENS = 1000
LENGTH_SIGMA = 0.8
MAX_TOKENS = 8192
CONTEXT = 16_384
STEP_SECONDS = 0.2
OPEN_GROUPS_PER_LANE = 8
"""Window, in groups per group's worth of lanes: wide enough that lanes alone bound what is in flight."""
VLLM_VERSION = "0.32.0"

FULL_SPEED_IN_FLIGHT = 4096
"""With more in flight each request is slower in proportion, as on an engine that is full: the same answers a second."""

FILL_SECONDS = 300.0
"""How long the run may take to fill its lanes; seconds on an idle machine."""

PACKAGES = ("msgspec", "numpy", "pyarrow")

AIM_CPU_MS = 1.0
AIM_LAG_P99_MS = 20.0

DESCRIPTION = f"""\
Measures the driver of a training run under load, on this machine, without a GPU.

Answers have a log-normal length with a mean of {MEAN_TOKENS} tokens (sigma {LENGTH_SIGMA}, cut at {MAX_TOKENS}). They
come at a fixed speed per request and are written as vLLM {VLLM_VERSION} writes them, about 140 bytes
a token; the middlewares that stand in front of vLLM stand in front of the fake engine too, and the
last of them makes arrays of an answer, unless --answers json. Groups of {GROUP_SIZE}, a batch of an eighth of what
is in flight, a training step of {STEP_SECONDS} s, a weight sync after each."""

EPILOG = f"""\
columns
  answers     what the driver receives, see --answers
  held        samples in flight on average over the measured time; far below the first column, the
              machine could not carry the load and the row says little
  driver      CPU of the driver process, all threads, per finished sample and per 1,000 tokens
              (aim: {AIM_CPU_MS:g} ms with 4,096 in flight)
  loop        the part of it that ran on the event loop's thread
  recorder    the part of it that ran on the recorder's thread
  reference   CPU of a fixed piece of work (reading one answer of {MEAN_TOKENS:,} tokens as JSON) at the end of
              the case: what the machine's other work does to all CPU times of the row
  lag         how late the loop ran what was due, over points that are evenly spaced in time
              (aim: p99 {AIM_LAG_P99_MS:g} ms); includes waiting for a core, so run it on an idle machine
  turns       the same from the CPU of the loop's own thread alone: what the lag would be on a core that
              nobody else uses
  samples/s   follows from the load (samples in flight x speed / length): it says that the load
              was met, not how fast the driver could be
  cores       CPU of the driver per second
  RSS         peak of the driver

examples
  python benchmarks/orchestrator.py --quick
  python benchmarks/orchestrator.py --json benchmarks/results/orchestrator.json
  python benchmarks/orchestrator.py --in-flight 4096 --answers arrays json
  python benchmarks/orchestrator.py --in-flight 16384 --repeats 1
  python benchmarks/orchestrator.py --in-flight 4096 --repeats 1 --profile driver.svg
"""


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
    """`arrays`: the server sends arrays, as a real one does. `json`: the driver reads vLLM's own JSON."""


def config_of(case: Case) -> TelescopeConfig:
    """A run whose lanes, not its async window, bound what is in flight."""
    groups = case.in_flight // GROUP_SIZE
    batch = max(2, groups // 8)
    return TelescopeConfig.model_validate(
        {
            "model": case.tokenizer,
            "environments": [{"name": "coin"}],
            "environments_path": [str(Path(__file__).parent / "environments")],
            "environment_workers": 1,
            "group_size": GROUP_SIZE,
            "prompts_batch_size_for_trainer": batch,
            # A group is open until its longest answer is there, several times as long as a lane is held.
            "max_async_rollout": OPEN_GROUPS_PER_LANE * groups // batch,
            "max_off_policy_steps": 1000,  # asked at every sync, and never the reason to throw a sample away
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
    """Servers, clients and a wired run."""
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
        packed = case.answers == "arrays"
        clients = [EngineClient(s.url, SECRET, index, packed_answers=packed) for index, s in enumerate(servers)]
        for client in clients:
            stack.push_async_callback(client.close)
        trainer = FakeTrainer(seconds=STEP_SECONDS, keep=False)
        run = await stack.enter_async_context(fake_run(config_of(case), folder, servers, clients, trainer=trainer))
        yield run, servers


async def measure(case: Case) -> dict[str, Any]:
    """Run one case and return its numbers."""
    with tempfile.TemporaryDirectory(prefix="telescope-benchmark-") as folder:
        async with started(case, Path(folder)) as (run, servers):
            supervisor = Supervisor()
            supervisor.spawn(run.servers.watch(), "server watch")
            training = asyncio.create_task(supervisor.run_until(run.orchestrator.run(supervisor)))
            try:
                return await _observe(case, run, servers, training)
            finally:
                training.cancel()
                await asyncio.wait([training])


async def _observe(
    case: Case, run: FakeRun, servers: list[ServerProcess], training: asyncio.Task[Any]
) -> dict[str, Any]:
    lag, turns = LagMeter(), TurnMeter()
    filled_by = time.monotonic() + FILL_SECONDS
    while run.lanes.num_used < 0.95 * case.in_flight:
        await _sleep(0.25, training)
        if time.monotonic() > filled_by:
            raise RuntimeError(
                f"only {run.lanes.num_used} samples in flight after {FILL_SECONDS:g} s: {run.status.parts}"
            )
    await _sleep(case.warm_up, training)
    start_lags = lag.take()
    turns.take()
    others = {"engines": [s.pid for s in servers], "environments": list(run.environments.status().pids)}
    before = cpu_seconds() | {name: cpu_seconds_of(pids) for name, pids in others.items()}
    samples, tokens, steps = run.status.num_samples_finished, run.status.num_tokens_generated, run.status.step
    started_at, in_flight = time.monotonic(), []
    while time.monotonic() < started_at + case.seconds:
        await _sleep(0.25, training)
        in_flight.append(run.lanes.num_used)
    seconds = time.monotonic() - started_at
    after = cpu_seconds() | {name: cpu_seconds_of(pids) for name, pids in others.items()}
    lags, (turn_seconds, turned) = lag.take(), turns.take()
    lag.stop()
    turns.stop()
    samples, tokens = run.status.num_samples_finished - samples, run.status.num_tokens_generated - tokens
    if samples == 0:
        raise RuntimeError(f"no sample finished within {seconds:.0f} s; the run: {run.status.parts}")
    ms = {name: 1000 * (after[name] - before.get(name, 0.0)) / samples for name in after}
    return {
        "driver_ms": ms["driver"],
        "driver_ms_per_1000_tokens": ms["driver"] * 1000 * samples / tokens,
        "loop_ms": ms["thread:loop"],
        "recorder_ms": ms.get("thread:telescope-recorder", 0.0),
        "engines_ms": ms["engines"],
        "environments_ms": ms["environments"],
        "driver_cores": (after["driver"] - before["driver"]) / seconds,
        "reference_ms": 1000 * reference_seconds(),
        "lag_p50_ms": 1000 * percentile(lags, 0.5),
        "lag_p99_ms": 1000 * percentile(lags, 0.99),
        "lag_max_ms": 1000 * max(lags),
        "turns_p99_ms": 1000 * lag_of_turns(turn_seconds, turned, 0.99),
        "turns_max_ms": 1000 * max(turn_seconds),
        "turns_per_second": len(turn_seconds) / turned,
        "lag_max_filling_ms": 1000 * max(start_lags),
        "samples": samples,
        "samples_per_second": samples / seconds,
        "tokens_per_sample": tokens / samples,
        "steps": run.status.step - steps,
        "in_flight_mean": statistics.mean(in_flight),
        "masked": run.status.num_masked_samples,
        "rows_dropped": sum(run.recorder.health().dropped.values()),
        "rss_mib": peak_rss_mib(),
        "seconds": seconds,
    }


def reference_seconds() -> float:
    """CPU of reading one answer of `MEAN_TOKENS` tokens as JSON, here and now: it shows what else the machine is doing,
    because neighbours on its caches and cores make the same work take longer."""
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


async def _sleep(seconds: float, training: asyncio.Task[Any]) -> None:
    """Sleep, unless the run ends, which it must not: then raise why."""
    done, _ = await asyncio.wait([training], timeout=seconds)
    if done:
        training.result()
        raise RuntimeError("the run ended before the measurement did")


def cases_of(arguments: argparse.Namespace, tokenizer: str, end_token: int) -> Iterator[Case]:
    """What to measure, in order."""
    for in_flight in arguments.in_flight:
        speed = arguments.tokens_per_second * min(1.0, FULL_SPEED_IN_FLIGHT / in_flight)
        # Long enough that starts and ends no longer come in waves: one and a half answers of mean length.
        warm_up = 1.5 * MEAN_TOKENS / speed
        for answers in arguments.answers:
            yield Case(in_flight, speed, warm_up, arguments.seconds, tokenizer, end_token, answers)


def run_case(case: Case, profile: str | None) -> dict[str, Any]:
    """Measure in a fresh process, so that cases do not warm or burden each other."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    if profile is not None:
        command = ["py-spy", "record", "--output", profile, "--rate", "200", "--threads", "--", *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"the case with {case.in_flight} samples in flight failed; its error stands above")
    return dict(json.loads(done.stdout.splitlines()[-1]))


COLUMNS = (
    ("in flight", "in_flight", "{:,.0f}"),
    ("answers", "answers", "{}"),
    ("held", "in_flight_mean", "{:,.0f}"),
    ("driver ms", "driver_ms", "{:.2f}"),
    ("per 1,000 tokens", "driver_ms_per_1000_tokens", "{:.2f}"),
    ("loop ms", "loop_ms", "{:.2f}"),
    ("recorder ms", "recorder_ms", "{:.2f}"),
    ("reference ms", "reference_ms", "{:.2f}"),
    ("lag p50 ms", "lag_p50_ms", "{:.1f}"),
    ("p99", "lag_p99_ms", "{:.1f}"),
    ("max", "lag_max_ms", "{:.0f}"),
    ("turns p99 ms", "turns_p99_ms", "{:.1f}"),
    ("samples/s", "samples_per_second", "{:.0f}"),
    ("tokens", "tokens_per_sample", "{:,.0f}"),
    ("cores", "driver_cores", "{:.2f}"),
    ("RSS MiB", "rss_mib", "{:.0f}"),
)


def median_of(case: Case, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number over repeats, with the repeats."""
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    named = {"in_flight": case.in_flight, "answers": case.answers, "tokens_per_second": case.tokens_per_second}
    return {**named, **medians, "runs": list(runs)}


def cells(result: dict[str, Any]) -> list[str]:
    return [form.format(result[name]) for _, name, form in COLUMNS]


def show(results: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="The driver under load (medians; CPU is per finished sample)")
    for title, _, _ in COLUMNS:
        table.add_column(title, justify="right")
    for result in results:
        table.add_row(*cells(result))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def _command(argv: Sequence[str]) -> str:
    """What to type for these numbers; where they were written to is of no interest."""
    at = argv.index("--json") if "--json" in argv else len(argv)
    return " ".join(["python benchmarks/orchestrator.py", *argv[:at], *argv[at + 2 :]])


def markdown(report: dict[str, Any]) -> str:
    """The report for people: the table, and where it was measured."""
    made = report["provenance"]
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report["settings"].items())
    lines = [
        "# The driver under load",
        "",
        f"`{report['command']}`, {made['date']}, commit {made['commit']}"
        f"{' with uncommitted changes' if made['uncommitted_changes'] else ''}, {made['cpu']}, {made['cores']} cores "
        "(shared by the driver, the fake engines and the environment worker), "
        f"Python {made['python']}, load average {made['load_before']} at the start. "
        f"Medians of {report['repeats']}. {settings[0].upper()}{settings[1:]}.",
        "",
        "| " + " | ".join(title for title, _, _ in COLUMNS) + " |",
        "|" + "---:|" * len(COLUMNS),
        *("| " + " | ".join(cells(result)) + " |" for result in report["results"]),
        "",
        "`python benchmarks/orchestrator.py --help` says what the columns mean.",
    ]
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    unit = GROUP_SIZE * NUM_SERVERS
    add("--in-flight", type=int, nargs="+", metavar="N",
        help=f"samples in flight, each a multiple of {unit} (default: 256 1024 4096)")  # fmt: skip
    add("--answers", nargs="+", choices=("arrays", "json"), default=["arrays"],
        help="what the driver receives: arrays that the server made of vLLM's JSON, or that JSON itself "
        "(default: arrays)")  # fmt: skip
    add("--seconds", type=float, default=40.0, help="measured seconds of each repeat (default: 40)")
    add("--tokens-per-second", type=float, default=50.0, metavar="S",
        help="speed of each request; at 50, one of 1,000 tokens takes 20 s (default: 50), and with more than "
        f"{FULL_SPEED_IN_FLIGHT:,} in flight it is lower in proportion")  # fmt: skip
    add("--repeats", type=int, default=3, help="fresh processes a case, of which the median counts (default: 3)")
    add("--quick", action="store_true", help="256 and 1024 in flight, once, 10 s each, at double speed")
    add("--json", type=Path, metavar="FILE", help="write everything there, and a table to FILE with .md")
    add("--profile", metavar="FILE", help="record the driver with py-spy into this flame graph")
    add("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.repeats, arguments.seconds = 1, 10.0
        arguments.tokens_per_second *= 2
        arguments.in_flight = arguments.in_flight or [256, 1024]
    arguments.in_flight = arguments.in_flight or [256, 1024, 4096]
    if wrong := [n for n in arguments.in_flight if n <= 0 or n % unit]:
        parser.error(f"--in-flight {wrong[0]}: use a positive multiple of {unit}, whole groups on every server")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.case:
        print(json.dumps(asyncio.run(measure(Case(**json.loads(arguments.case))))))
        return 0
    made = provenance(PACKAGES)
    results = []
    with tempfile.TemporaryDirectory(prefix="telescope-benchmark-") as folder:
        end_token = save_tokenizer(Path(folder))
        for case in cases_of(arguments, folder, end_token):
            runs = []
            for repeat in range(arguments.repeats):
                what = f"{case.in_flight} in flight, {case.answers}"
                print(f"{what}, repeat {repeat + 1} of {arguments.repeats} ...", file=sys.stderr)
                runs.append(run_case(case, arguments.profile))
                print("  {driver_ms:.2f} ms a sample, lag p99 {lag_p99_ms:.1f} ms".format(**runs[-1]), file=sys.stderr)
            results.append(median_of(case, runs))
    show(results)
    if arguments.json:
        report = {
            "benchmark": "orchestrator",
            "command": _command(sys.argv[1:] if argv is None else argv),
            "provenance": made,
            "settings": {
                "group_size": GROUP_SIZE, "servers": NUM_SERVERS, "mean_tokens": MEAN_TOKENS,
                "length_sigma": LENGTH_SIGMA, "max_tokens": MAX_TOKENS, "vocabulary": VOCABULARY,
                "vllm_format": VLLM_VERSION, "tokens_per_second_of_a_request": arguments.tokens_per_second,
                "seconds": arguments.seconds,
            },
            "repeats": arguments.repeats,
            "results": results,
        }  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        arguments.json.with_suffix(".md").write_text(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
