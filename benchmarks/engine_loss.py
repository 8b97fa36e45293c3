"""Kills one of two engines during generation and measures its detection, restart and recovery.

    python benchmarks/engine_loss.py --quick                                  the tiny model on the CPU
    python benchmarks/engine_loss.py --json benchmarks/results/engine_loss.json   the README's example on four GPUs

Runs the same as `end_to_end.py`. After --before seconds of training every process of the last server's vLLM gets
SIGKILL. The run continues with the others, which retry its requests. Times count from the kill:

    noticed          no further sample is sent to the server
    answers          its new process answers (its own start, and the delay before it)
    back             it has the current weights, verified, and receives samples
    full throughput  it computes 90 % of its earlier tokens/s, as a mean over five seconds

Aim: full throughput within the engine's own start (with a warm compile cache) plus 10 s. Then the run is stopped
as by Ctrl-C, and the record must account for every sample: each group of a trained step has all of its samples, no
group and no sample occurs twice, none is missing, none was masked.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from command_line import parser_of, require_gpus, show
from whole_run import Case, WholeRun, add_case_arguments

from telescope.utils.text import pluralize

AIM_SECONDS = 10.0
FULL = 0.9
WINDOW_SECONDS = 5.0
FULL_WITHIN_SECONDS = 60.0
NOTICED, BACK = "server {} is down", "inference server {} is back"


def main() -> int:
    arguments = parse()
    case = Case.of(arguments, inference_num_workers=2)
    case.fields.setdefault("number_of_steps", 1_000_000)  # it is stopped
    with case.prepared("engine-loss") as run:
        with run:
            results = lose_engine(run, arguments)
        results["samples"] = account(run, case.fields.get("group_size", 8))
    print_results(results)
    case.report(results=results)
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "the tiny model on the CPU")
    add_case_arguments(parser, port=8870)
    add = parser.add_argument
    add("--before", type=float, default=20.0, help="seconds of training before the kill, after --warm-up steps")
    add("--after", type=float, default=10.0, help="seconds of training after everything is back")
    add("--timeout", type=float, default=600.0, help="seconds for the start, and for coming back")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    return arguments


def lose_engine(run: WholeRun, arguments: argparse.Namespace) -> dict[str, Any]:
    """Kills the engine of a run under load and waits for its recovery."""
    run.wait_until(
        pluralize(arguments.warm_up, "step"), lambda: len(run.steps()) >= arguments.warm_up, arguments.timeout
    )  # fmt: skip
    start = time.time()
    time.sleep(arguments.before)
    killed = len(run.meters) - 1
    meter = run.meters[killed]
    in_flight = meter.readings[-1].running
    group = engine_group(run.run_dir, run.ports[killed])
    killed_at = time.time()
    os.killpg(group, signal.SIGKILL)
    before = [m.tokens_per_second(start, killed_at) for m in run.meters]
    full_at = 0.0

    def is_full() -> bool:
        nonlocal full_at
        full_at = time.time()
        begun = full_at - WINDOW_SECONDS
        return begun > killed_at and meter.tokens_per_second(begun, full_at) >= FULL * before[killed]

    run.wait_until(
        "return of the server", lambda: bool(run.log_rows(BACK.format(killed), killed_at)), arguments.timeout
    )
    became_full = run.reaches(is_full, FULL_WITHIN_SECONDS)
    time.sleep(arguments.after)
    stopped_at = time.time()
    run.stop()
    noticed, back = run.log_rows(NOTICED.format(killed), killed_at)[0], run.log_rows(BACK.format(killed), killed_at)[0]
    own_start = float(back["message"].partition("its start took ")[2].partition(" s")[0])
    answers = next(at for at, r in zip(meter.times, meter.readings, strict=True) if at > killed_at and r.steps == 0)
    return {
        "requests_in_flight": in_flight,
        "noticed": noticed["time"] - killed_at,
        "scheduler_up": answers - killed_at,
        "own_start": own_start,
        "back": back["time"] - killed_at,
        "full_throughput": full_at - WINDOW_SECONDS - killed_at if became_full else None,
        "over_own_start": full_at - WINDOW_SECONDS - killed_at - own_start if became_full else None,
        "tokens_per_second_before": before,
        "tokens_per_second_meanwhile": [m.tokens_per_second(killed_at, back["time"]) for m in run.meters],
        "tokens_per_second_after": [m.tokens_per_second(full_at, stopped_at) for m in run.meters],
        "messages": [row["message"] for row in run.log_rows(f"server {killed}", killed_at)][:40],
    }


def engine_group(run_dir: Path, port: int) -> int:
    """Returns the process group of the vLLM server on this port."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            if b"vllm.entrypoints.openai.api_server" in words and str(port).encode() in words:
                return os.getpgid(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):  # it exited meanwhile
            continue
    raise RuntimeError(f"no vLLM server on port {port}; logs are in {run_dir / 'logs'}")


def account(run: WholeRun, group_size: int) -> dict[str, Any]:
    """Returns the fate of every sample from the record. Raises RuntimeError when one is missing or counted twice."""
    steps = run.steps()
    groups = run.record.table("groups", columns=["group_id", "status", "reason", "step"]).to_pylist()
    columns = ["sample_id", "group_id", "status", "reason", "failure_kind", "step"]
    samples = run.record.table("samples", columns=columns).to_pylist()
    of_group = Counter(sample["group_id"] for sample in samples)
    problems = []
    if len({group["group_id"] for group in groups}) != len(groups):
        problems.append("a group has two rows")
    if len({sample["sample_id"] for sample in samples}) != len(samples):
        problems.append("a sample has two rows")
    if sorted(group["group_id"] for group in groups) != list(range(len(groups))):
        problems.append("an opened prompt has no row")
    short = [group for group in groups if of_group[group["group_id"]] != group_size]
    if short:
        problems.append(f"{len(short)} groups do not have {group_size} samples, as {short[0]}")
    kept = Counter(group["step"] for group in groups if group["status"] == "kept")
    if any(kept[step["step"]] != step["num_groups"] for step in steps):
        problems.append("a step trained other groups than the record shows")
    if problems:
        raise RuntimeError(f"the record does not account for every sample: {'; '.join(problems)}")
    fates = Counter(s["status"] if s["reason"] is None else f"{s['status']}/{s['reason']}" for s in samples)
    return {
        "steps": len(steps),
        "groups": len(groups),
        "samples": len(samples),
        "by_fate": dict(fates),
        "masked_by_infrastructure": sum(sample["failure_kind"] == "infrastructure" for sample in samples),
        "requests_asked_again": int(sum(s["metrics"].get("retried/unseen", 0.0) for s in steps)),
        "tokens_of_failed_requests": int(sum(s["metrics"].get("retried/tokens", 0.0) for s in steps)),
    }


def print_results(results: dict[str, Any]) -> None:
    samples = results["samples"]
    rows = (
        ("requests in flight on it", f"{results['requests_in_flight']}", ""),
        ("noticed, s", f"{results['noticed']:.1f}", ""),
        ("own start of the new process, s", f"{results['own_start']:.1f}", ""),
        ("back with the current weights, s", f"{results['back']:.1f}", ""),
        ("full throughput, s", _seconds(results["full_throughput"]), f"{results['own_start'] + AIM_SECONDS:.1f}"),
        ("  over its own start, s", _seconds(results["over_own_start"]), f"{AIM_SECONDS:.0f}"),
        ("tokens/s by server, before", _rates(results["tokens_per_second_before"]), ""),
        ("  meanwhile", _rates(results["tokens_per_second_meanwhile"]), ""),
        ("  after", _rates(results["tokens_per_second_after"]), ""),
        ("samples masked", f"{samples['masked_by_infrastructure']}", "0"),
        ("samples, all accounted for", f"{samples['samples']:,}", ""),
        ("requests retried", f"{samples['requests_asked_again']}", ""),
    )
    show(("", "measured", "aim"), rows, "An engine is killed during generation")


def _seconds(seconds: float | None) -> str:
    return "not reached" if seconds is None else f"{seconds:.1f}"


def _rates(rates: list[float]) -> str:
    return " ".join(f"{rate:,.0f}" for rate in rates)


if __name__ == "__main__":
    sys.exit(main())
