"""Measures what rollout workers cost a run: steps lost by dividing request slots, CPU, lag, starts and kills.

    python benchmarks/rollout_workers.py --quick
    python benchmarks/rollout_workers.py --json results.json
    python benchmarks/rollout_workers.py --parts driver

The first table is on a simulated clock: the real loops, window and workers over fake engines, with the slots of
`share_slots` for 1, 4, 8 and 16 workers, and divided evenly among more workers for pairs of less than a group. A seed
gives each prompt the same answers with any number of workers.

The second table is CPU time of this process: the real pool, loops, packing and recorder, over a scripted worker in the
same process whose own time is subtracted. Ray's calls are not included.

The last table is of real workers, in actors of Ray on this machine (`rollout_actors.py`): turns of four-turn samples of
1,000 tokens as fast as they go, lag with 16,384 samples in flight, a worker killed every 10 seconds, and the start of a
worker. Turns per second of 8 workers with a core each are the smaller of what their CPU and the driver's allow.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

from command_line import parser_of, show, write_json
from measure import cpu_seconds, provenance
from record import make_group
from rollout_actors import measure, orchestrator_of
from rollouts import MEAN_TOKENS, SampleRows, length_of
from tests.fakes.engine import FakeRequest
from tests.unit.orchestrator.fakes import config_of
from tests.unit.orchestrator.simulated_clock import run_simulated
from tests.unit.orchestrator.simulation import Pace, Simulation

from telescope.environments.types import EnvironmentInfo, PreparedPrompt
from telescope.orchestrator.supervision import Supervisor
from telescope.record.recorder import Recorder
from telescope.rollout.exchange import TRAINING, LaneState, Orders, Report, RunningSample
from telescope.rollout.pool import RolloutPool
from telescope.rollout.request_slots import share_slots
from telescope.rollout.sample import RolloutTask
from telescope.rollout.sample_rows import encode_rows
from telescope.rollout.trajectory import Trajectory
from telescope.rollout.worker import MANY_EVENTS
from telescope.trainer.batch import StepInput
from telescope.utils.text import pluralize

GROUP_SIZE = 8
SLOTS = 64
"""Request slots of a server."""
MEAN_SECONDS = 20.0
TOKENS = 50
"""Tokens of a mean answer. Few, because only time counts here; the longest answers take eight times as long."""
TRAIN_SHARE = 0.5
"""Duration of a training step relative to generating one batch with full request slots: generation is the limit."""
WARM_UP_STEPS, COOL_DOWN_STEPS = 4, 4
"""Steps that do not count: slots fill, and near its end a run opens no groups."""
MAX_LOSS = 0.01
NUM_WORKERS = (1, 4, 8, 16)
NUM_TOKENS = 1000
"""Tokens of a scripted answer."""
DRIVER_SLOTS = 512
MAX_DRIVER_MS = 0.15
MIN_TURNS_PER_SECOND, MAX_LAG_MS, MAX_START_SECONDS, MAX_MIB = 5000, 20, 1, 150
NUM_CORES = 8
"""Workers with a core each, for which turns per second are extrapolated."""
PARTS = ("slots", "driver", "start", "turns", "lag", "kills")


def answer(request: FakeRequest) -> list[int]:
    """Returns an answer of log-normal length, as in `rollouts.py`. Its last token decides the reward."""
    return [7] * (length_of(request.seed) * TOKENS // MEAN_TOKENS) + [2 + request.seed % 2]


@dataclass(frozen=True)
class Case:
    """A run. `even` gives all workers the same slots on each server, however few."""

    servers: int
    ahead: int
    """`max_async_rollout`."""
    frees: bool
    """`free_lane_after_generation`."""
    workers: int
    even: bool = False

    @property
    def shares(self) -> list[list[int]]:
        """Slots of each worker on each server."""
        if self.even:
            return [[SLOTS // self.workers] * self.servers] * self.workers
        return share_slots([SLOTS] * self.servers, self.workers, GROUP_SIZE)


class TimedSimulation(Simulation):
    """A run that notes when each step begins. A batch is as many samples as there are request slots."""

    def __init__(self, case: Case, steps: int, seed: int) -> None:
        train = TRAIN_SHARE * MEAN_SECONDS
        pace = Pace((train, train), sync=0.2, score=(0.0, 2.0), tokens_per_second=TOKENS / MEAN_SECONDS)
        config = config_of(
            seed=seed, group_size=GROUP_SIZE, prompts_batch_size_for_trainer=case.servers * SLOTS // GROUP_SIZE,
            number_of_steps=WARM_UP_STEPS + steps + COOL_DOWN_STEPS, max_async_rollout=case.ahead,
            max_off_policy_steps=-1, free_lane_after_generation=case.frees, inference_num_workers=case.servers,
            max_concurrent_prompts_per_server=SLOTS // GROUP_SIZE, discard_group_zero_advantage=False,
            max_tokens=1000, max_model_len=2000, seq_len=4000,
        )  # fmt: skip
        with patch("telescope.rollout.request_slots.share_slots", lambda *_: case.shares):
            super().__init__(
                config, pace, seed=seed, num_servers=case.servers, num_workers=case.workers, answer=answer,
                recorder=SampleRows(),
            )  # fmt: skip
        self.trainer.on_step = self._note_step
        self.steps_at: list[float] = []

    def _note_step(self, inputs: list[StepInput]) -> None:
        self.steps_at.append(asyncio.get_running_loop().time())

    async def steps_per_hour(self) -> float:
        await self.run()
        first, last = self.steps_at[WARM_UP_STEPS], self.steps_at[-1 - COOL_DOWN_STEPS]
        return 3600 * (len(self.steps_at) - 1 - WARM_UP_STEPS - COOL_DOWN_STEPS) / (last - first)


def lost_steps(cases: Sequence[Case], steps: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the steps per hour of each case, and the median share lost against one worker with the same seed."""
    results, one = [], list[float]()
    for case in cases:
        runs = [run_simulated(TimedSimulation(case, steps, seed).steps_per_hour()) for seed in seeds]
        one = runs if case.workers == 1 else one
        loss = statistics.median(1 - run / of_one for run, of_one in zip(runs, one, strict=True))
        print(f"{case}: {loss:.2%}", file=sys.stderr)
        slots = sorted({slots for share in case.shares for slots in share if slots})
        results.append({**asdict(case), "slots": slots, "steps_per_hour": runs, "loss": loss})
    return results


def cases_of(quick: bool) -> list[Case]:
    """Returns the cases, those with one worker before the others of their setting."""
    settings = [(4, 2, True)] if quick else [(4, a, f) for a in (0, 2, 3) for f in (True, False)] + [(8, 3, True)]
    cases = []
    for setting in settings:
        cases += [Case(*setting, workers) for workers in NUM_WORKERS]
        if setting[0] == 4 and setting[2]:
            cases += [Case(*setting, workers, even=True) for workers in (8, 16, 64)]
    return cases


class ScriptedWorker:
    """A worker whose samples end at once, 32 in each report. `seconds` is the CPU time of its own work.

    With `pickled`, a report comes as bytes, which the driver unpickles.
    """

    def __init__(self, pickled: bool) -> None:
        self.seconds = 0.0
        self.num_calls = 0
        self._pickled = pickled
        self._groups = [make_group(n, NUM_TOKENS) for n in range(64)]
        self._running: deque[tuple[int, int, RolloutTask]] = deque()
        self._has_enough = asyncio.Event()

    async def exchange(self, orders: Orders, *, seconds: float | None = None, interval: float = 0.0) -> Report:
        self.num_calls += 1
        if orders.is_empty:
            await self._has_enough.wait()
        started = time.thread_time()
        report = self._report(orders)
        data = pickle.dumps(report, protocol=5) if self._pickled else b""
        self.seconds += time.thread_time() - started
        return pickle.loads(data) if data else report

    async def restart(self) -> None:
        raise NotImplementedError("a scripted worker is never lost")

    def _report(self, orders: Orders) -> Report:
        report = Report(prompts=[(number, self._prompt(item)) for number, _, item in orders.prompts])
        for task in orders.groups:
            for index, opened in task.samples.items():
                self._running.append((task.key, index, opened))
                report.running[task.key, index] = RunningSample(0, len(self._running), time.time(), 0)
        if orders.is_empty:
            for key, index, ended in [self._running.popleft() for _ in range(MANY_EVENTS)]:
                report.samples.append((key, index, self._sample(ended)))
            report.rows = encode_rows(report.trajectories, set())
            for sample in report.trajectories:
                sample.fold()
        if len(self._running) >= MANY_EVENTS:
            self._has_enough.set()
        else:
            self._has_enough.clear()
        report.lanes = {TRAINING: LaneState([len(self._running)], DRIVER_SLOTS - len(self._running))}
        return report

    def _prompt(self, item: int) -> PreparedPrompt:
        prompt = self._groups[item % len(self._groups)].prompt
        return PreparedPrompt(prompt.token_ids, prompt.text, [], f"uid {item}")

    def _sample(self, task: RolloutTask) -> Trajectory:
        made = self._groups[task.group_id % len(self._groups)].samples[task.sample_index]
        return replace(
            made, sample_id=task.sample_id, group_id=task.group_id, environment=task.environment, turns=list(made.turns)
        )


async def driver_cpu(pickled: bool, steps: int) -> dict[str, Any]:
    """Runs a driver over a scripted worker as fast as it goes. Returns CPU in ms per finished sample, by thread."""
    config = config_of(
        group_size=GROUP_SIZE, prompts_batch_size_for_trainer=16, number_of_steps=steps, max_async_rollout=8,
        max_off_policy_steps=-1, max_concurrent_prompts_per_server=DRIVER_SLOTS // GROUP_SIZE,
        discard_group_zero_advantage=False, max_tokens=NUM_TOKENS, max_model_len=2000, seq_len=8192,
    )  # fmt: skip
    worker, supervisor = ScriptedWorker(pickled), Supervisor()
    pool = RolloutPool([worker])
    slots = pool.open_lane(TRAINING, [DRIVER_SLOTS], GROUP_SIZE)
    slots.set_up(0, True)
    with tempfile.TemporaryDirectory(prefix="telescope-driver-") as folder, Recorder(folder) as recorder:
        orchestrator = orchestrator_of(config, pool, slots, EnvironmentInfo("math", 100_000), "math", recorder)
        status = orchestrator.status
        before = cpu_seconds()
        await supervisor.run_until(orchestrator.run(supervisor))
        recorder.flush()
        used = Counter(cpu_seconds())
        used.subtract(before)
        dropped = sum(recorder.dropped.values())
        await pool.close()
    ms = {name: 1000 * seconds / status.num_samples_finished for name, seconds in used.items()}
    own = 1000 * worker.seconds / status.num_samples_finished
    recorded = ms["thread:telescope-recorder"]
    return {
        "pickled": pickled,
        "samples": status.num_samples_finished,
        "driver_ms": ms["driver"] - own,
        "loop_ms": ms["thread:loop"] - own,
        "recorder_ms": recorded,
        "packing_ms": ms["driver"] - ms["thread:loop"] - recorded,
        "worker_ms": own,
        "calls_per_sample": worker.num_calls / status.num_samples_finished,
        "rows_dropped": dropped,
    }


def show_lost(lost: Sequence[dict[str, Any]]) -> bool:
    """Prints the steps lost. Returns whether every target is met."""
    rows, is_met = [], True
    for row in lost:
        good = row["loss"] <= MAX_LOSS
        is_met = is_met and (good or row["even"])
        speed = statistics.median(row["steps_per_hour"])
        check = ("ok" if good else "over 1 %") + (" (all servers shared evenly)" if row["even"] else "")
        cells = (row["servers"], row["ahead"], row["frees"], row["workers"], " ".join(map(str, row["slots"])))
        rows.append([*map(str, cells), f"{speed:.1f}", f"{row['loss']:.2%}", check])
    titles = ("servers", "max_async_rollout", "free lane", "workers", "slots of a pair", "steps/h", "lost", "check")
    show(titles, rows, f"Steps lost by dividing request slots (groups of {GROUP_SIZE})", texts=0)
    return is_met


def show_drivers(drivers: Sequence[dict[str, Any]]) -> bool:
    """Prints the CPU time of the driver. Returns whether every target is met."""
    rows, is_met = [], True
    for row in drivers:
        good = row["driver_ms"] <= MAX_DRIVER_MS
        is_met = is_met and good
        numbers = (f"{row[name]:.3f}" for name in ("driver_ms", "loop_ms", "recorder_ms", "packing_ms"))
        kind, check = "pickled" if row["pickled"] else "objects", "ok" if good else f"over {MAX_DRIVER_MS} ms"
        rows.append([kind, f"{row['samples']:,}", *numbers, f"{row['calls_per_sample']:.2f}", check])
    titles = ("reports", "samples", "driver", "loop", "recorder", "packing", "calls", "check")
    show(titles, rows, f"Driver: CPU in ms per finished sample of {NUM_TOKENS:,} tokens")
    return is_met


def show_actors(found: dict[str, list[dict[str, Any]]]) -> bool:
    """Prints what was measured of real workers. Returns whether every target is met."""
    checks: list[tuple[str, str, str, bool]] = []
    for row in found.get("turns", ()):
        name = f"{pluralize(row['workers'], 'worker')}: turns/s"
        cpu = f"{row['worker_ms_per_turn']:.2f} + {row['driver_ms_per_turn']:.2f} ms"
        what = f"{name} here; CPU a turn, worker + driver"
        checks.append((what, f"{row['turns_per_second']:.0f}; {cpu}", "", True))
        allowed = (NUM_CORES * 1000 / row["worker_ms_per_turn"], 1000 / row["driver_ms_per_turn"])
        what = f"{name} that {NUM_CORES} cores of workers and one of the driver allow"
        rates = " and ".join(f"{rate:,.0f}" for rate in allowed)
        checks.append((what, rates, f"{MIN_TURNS_PER_SECOND:,}", min(allowed) >= MIN_TURNS_PER_SECOND))
    for row in found.get("lag", ()):
        load = f"{row['in_flight']:,.0f} in flight, {row['samples_per_second']:.0f} samples/s"
        what = f"lag of the driver's loop, p99, {load}"
        checks.append((what, f"{row['lag_p99_ms']:.1f} ms", f"{MAX_LAG_MS} ms", row["lag_p99_ms"] <= MAX_LAG_MS))
        checks.append(("  of its own CPU alone", f"{row['turns_p99_ms']:.1f} ms", "", True))
        what, good = "  driver CPU a sample, Ray's calls included", row["driver_ms"] <= MAX_DRIVER_MS
        checks.append((what, f"{row['driver_ms']:.2f} ms", f"{MAX_DRIVER_MS} ms", good))
    for row in found.get("kills", ()):
        what = f"{row['kills']} kills in {row['seconds']:.0f} s: samples run again, of {row['samples_of_trained']:,}"
        checks.append((what, f"{row['samples_run_again']}; {row['masked']} masked", "ledger exact", row["exact"]))
    for row in found.get("start", ()):
        what = f"start of a worker (CPU {row['cpu_seconds']:.2f} s), after Ray's {row['ray_seconds']:.1f} s"
        checks.append((what, f"{row['seconds']:.2f} s", f"{MAX_START_SECONDS} s", row["seconds"] <= MAX_START_SECONDS))
        what = f"memory of a worker, private {row['private_mib']:.0f} MiB; of an empty actor {row['ray_rss_mib']:.0f}"
        checks.append((what, f"{row['rss_mib']:.0f} MiB", f"{MAX_MIB} MiB", row["rss_mib"] <= MAX_MIB))
    rows = [(*cells, "ok" if good else "missed") for *cells, good in checks]
    show(("what", "measured", "target", "check"), rows, "Rollout workers in actors of Ray", width=140)
    return all(good for *_, good in checks)


def main() -> int:
    parser = parser_of(__doc__, "one setting, one seed and few steps")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    arguments = parser.parse_args()
    quick, path = arguments.quick, arguments.json
    steps, seeds = (5, [0]) if quick else (20, [0, 1, 2])
    made, is_met = provenance(["numpy", "pyarrow", "ray"]), True
    found: dict[str, list[dict[str, Any]]] = {}
    if "slots" in arguments.parts:
        found["slots"] = lost_steps(cases_of(quick), steps, seeds)
        is_met &= show_lost(found["slots"])
    if "driver" in arguments.parts:
        asyncio.run(driver_cpu(False, 5))  # imports, and the first rows
        found["driver"] = []
        for pickled in (False, True):
            runs = [asyncio.run(driver_cpu(pickled, 20 if quick else 50)) for _ in seeds]
            found["driver"].append(sorted(runs, key=lambda run: run["driver_ms"])[len(runs) // 2])
        is_met &= show_drivers(found["driver"])
    if actors := measure([part for part in arguments.parts if part not in found], quick):
        is_met &= show_actors(actors)
    report = json.loads(path.read_text()) if path and path.exists() else {}
    settings = {"seeds": seeds, "steps": steps, "group_size": GROUP_SIZE, "slots": SLOTS}
    for part, results in (found | actors).items():
        report[part] = {"provenance": made, "settings": settings, "results": results}
    write_json(path, report)  # keeps other parts in the file
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
