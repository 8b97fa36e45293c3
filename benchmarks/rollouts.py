"""Compares policies of asynchronous generation: idle time, wasted tokens, age and length bias.

    python benchmarks/rollouts.py --quick                 one seed, few steps
    python benchmarks/rollouts.py --json results.json     every policy, seeds 0, 1 and 2

The real loops, request slots, window and staleness over the fake engine, on a simulated clock: hours of a run take
seconds, and a seed always gives the same numbers on any machine.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import statistics
import sys
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from command_line import command, parser_of, show, write_json
from measure import provenance
from tests.fakes.engine import FakeRequest
from tests.unit.orchestrator.fakes import StrictRecorder, config_of
from tests.unit.orchestrator.simulated_clock import run_simulated
from tests.unit.orchestrator.simulation import Pace, Simulation

from telescope.orchestrator.async_window import MAX_REQUEUES
from telescope.orchestrator.step_recorder import RUN_ENDED
from telescope.trainer.batch import StepInput

GROUP_SIZE = 8
BATCH_GROUPS = 32
SLOT_GROUPS = 64
SERVERS = 2
TOKENS_PER_SECOND = 50.0
MEAN_TOKENS = 1000
LENGTH_SIGMA = 1.0
MAX_TOKENS = 8192
LONG_TOKENS = 4000
SYNC_SECONDS = 0.2
TRAIN_SHARE = 0.9
"""Duration of a training step relative to generating one batch with full request slots: a roughly balanced run."""

WARM_UP_STEPS = 20
COOL_DOWN_STEPS = 20
"""Trained steps that do not count. The longest answer takes about 17 steps, before which only shorter ones can have
been trained; near its end a run opens no groups, because no step is left for them."""

METER_SECONDS = 0.5


@dataclass(frozen=True)
class Policy:
    """Limits of how far generation runs ahead, and the fate of groups that are too old."""

    name: str
    steps_ahead: int
    max_age: int = -1
    returns: int = MAX_REQUEUES
    """Requeues of a prompt whose group is too old; a run has no setting for it."""


POLICIES = (
    Policy("synchronous", 0),
    Policy("one step ahead", 1),
    Policy("async, keep", 8),
    Policy("async, requeue over 4", 8, max_age=4),
    Policy("async, drop over 4", 8, max_age=4, returns=0),
    Policy("async, requeue over 8", 8, max_age=8),
    Policy("async, drop over 8", 8, max_age=8, returns=0),
)

DESCRIPTION = f"""\
Compares policies of asynchronous training on a simulated clock.

{SERVERS} servers with {SLOT_GROUPS * GROUP_SIZE} request slots in all, {TOKENS_PER_SECOND:g} tokens per second and
request; groups of {GROUP_SIZE}, batches of {BATCH_GROUPS} groups. Answers have a log-normal length (mean
{MEAN_TOKENS} tokens, sigma {LENGTH_SIGMA:g}, cut at {MAX_TOKENS:,}), determined by the request's seed: a requeued
prompt gets an answer of the same length. A training step takes {TRAIN_SHARE:.0%} of the time of a batch with full
slots, a weight sync {SYNC_SECONDS:g} s, during which requests freeze. Rewards do not depend on lengths."""

EPILOG = f"""\
policies
  synchronous     max_async_rollout 0: a batch is sampled by the weights it trains
  one step ahead  max_async_rollout 1
  async           max_async_rollout 8, weights updated while answers are being sampled
  keep            nothing grows too old (max_off_policy_steps -1)
  requeue         a group older than max_off_policy_steps is aborted and its prompt requeued, twice at most
  drop            it is aborted and dropped (not a setting of a run; for comparison)

columns
  steps/h         training steps an hour of simulated time
  generator idle  share of slot time in which no request runs, pauses for weights included
  trainer waits   share of time in which the trainer has no batch
  wasted          tokens sampled and discarded, of all tokens whose outcome is known
  age, oldest     training steps between the weights that sampled a token and those it trains: mean, maximum
  length          mean length of a trained answer over that of the distribution: 1 is no bias
  long answers    share of answers over {LONG_TOKENS:,} tokens among the trained, over that of the distribution"""


class SampleRows(StrictRecorder):
    """Records steps and the fates of groups and samples, without their tokens."""

    def write(self, table: str, row: Any) -> None:
        if table in ("steps", "groups", "samples"):
            super().write(table, row)

    def set_in_flight(self, rows: list[dict[str, Any]]) -> None:
        return


def length_of(seed: int) -> int:
    """Returns the length of the answer to a request with this seed."""
    mu = math.log(MEAN_TOKENS) - LENGTH_SIGMA**2 / 2
    drawn = random.Random(seed).lognormvariate(mu, LENGTH_SIGMA)
    return min(MAX_TOKENS, max(1, round(drawn)))


def answer(request: FakeRequest) -> list[int]:
    """Returns an answer whose last token decides the reward."""
    return [7] * (length_of(request.seed) - 1) + [2 + zlib.crc32(request.seed.to_bytes(8, "little")) % 2]


class MeteredSimulation(Simulation):
    """A run of one policy, with meters on its engines and its trainer."""

    def __init__(self, policy: Policy, steps: int, seed: int) -> None:
        samples_per_second = SLOT_GROUPS * GROUP_SIZE * TOKENS_PER_SECOND / MEAN_TOKENS
        train_seconds = TRAIN_SHARE * BATCH_GROUPS * GROUP_SIZE / samples_per_second
        pace = Pace(
            train=(train_seconds, train_seconds), sync=SYNC_SECONDS, score=(0.0, 0.2),
            tokens_per_second=TOKENS_PER_SECOND,
        )  # fmt: skip
        config = config_of(
            seed=seed, group_size=GROUP_SIZE, prompts_batch_size_for_trainer=BATCH_GROUPS,
            number_of_steps=steps + COOL_DOWN_STEPS,
            max_async_rollout=policy.steps_ahead, max_off_policy_steps=policy.max_age,
            max_concurrent_prompts_per_server=SLOT_GROUPS // SERVERS, inference_num_workers=SERVERS,
            discard_group_zero_advantage=False, max_tokens=MAX_TOKENS, max_model_len=2 * MAX_TOKENS,
            seq_len=2 * MAX_TOKENS,
        )  # fmt: skip
        super().__init__(
            config, pace, seed=seed, num_servers=SERVERS, answer=answer, recorder=SampleRows(),
            max_requeues=policy.returns,
        )  # fmt: skip
        self.trainer.on_step = self._note_step
        self.lengths: list[list[int]] = []
        self.batches_at: list[float] = []
        self.running: list[tuple[float, int]] = []

    def _note_step(self, inputs: list[StepInput]) -> None:
        self.batches_at.append(asyncio.get_running_loop().time())
        batches = [b for rank in inputs for m in rank.minibatches for b in m.micro_batches]
        prompt = 1
        self.lengths.append([int(n) - prompt for b in batches for n in np.diff(b.cu_seqlens)[: len(b.sample_ids)]])

    async def measured(self) -> dict[str, float]:
        """Runs to the end and returns the numbers after the warm-up."""
        meter = asyncio.create_task(self._meter())
        await self.run()
        meter.cancel()
        with suppress(asyncio.CancelledError):
            await meter
        sampled = sum(server.engine.num_sampled_tokens for server in self.servers)
        recorded = sum(row["completion_tokens"] for row in self.recorder.of("samples"))
        assert recorded == sampled, f"the engines sampled {sampled} tokens, but the record has {recorded}"
        return self._results()

    async def _meter(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            running = sum(s.engine.num_running for s in self.servers if not s.engine.paused)
            self.running.append((loop.time(), running))
            await asyncio.sleep(METER_SECONDS)

    def _results(self) -> dict[str, float]:
        last = len(self.batches_at) - COOL_DOWN_STEPS
        start, end = self.batches_at[WARM_UP_STEPS], self.batches_at[last]
        num_steps = last - WARM_UP_STEPS
        busy_a_step = self.pace.train[0] + self.pace.sync
        running = [count for at, count in self.running if start <= at < end]
        ages = [age for step in self.trainer.ages[WARM_UP_STEPS:last] for age in step]
        lengths = [length for step in self.lengths[WARM_UP_STEPS:last] for length in step]
        tokens: dict[bool, int] = {True: 0, False: 0}
        for row in self.recorder.of("samples"):
            if row["reason"] != RUN_ENDED and WARM_UP_STEPS <= row["step"] < last:
                tokens[row["status"] == "kept"] += row["completion_tokens"]
        return {
            "steps_per_hour": 3600 * num_steps / (end - start),
            "generator_idle": 1 - float(np.mean(running)) / (SLOT_GROUPS * GROUP_SIZE),
            "trainer_waiting": 1 - num_steps * busy_a_step / (end - start),
            "wasted": tokens[False] / (tokens[True] + tokens[False]),
            "age_mean": float(np.mean(ages)),
            "age_max": float(max(ages)),
            "length_ratio": float(np.mean(lengths) / drawn_lengths().mean()),
            "long_ratio": float(np.mean(np.array(lengths) > LONG_TOKENS) / np.mean(drawn_lengths() > LONG_TOKENS)),
            "dropped_groups": float(len(self.recorder.of("groups", status="discarded"))),
        }


@functools.cache
def drawn_lengths() -> np.ndarray:
    """Returns many lengths from the distribution."""
    return np.array([length_of(seed) for seed in range(200_000)])


def run_policy(policy: Policy, steps: int, seed: int) -> dict[str, float]:
    """Runs one policy with one seed."""
    measured: dict[str, float] = run_simulated(MeteredSimulation(policy, steps, seed).measured())
    return measured


COLUMNS = (
    ("steps/h", "steps_per_hour", "{:.0f}"),
    ("generator idle", "generator_idle", "{:.1%}"),
    ("trainer waits", "trainer_waiting", "{:.1%}"),
    ("wasted", "wasted", "{:.1%}"),
    ("age", "age_mean", "{:.2f}"),
    ("oldest", "age_max", "{:.0f}"),
    ("length", "length_ratio", "{:.3f}"),
    ("long answers", "long_ratio", "{:.2f}"),
)


def main() -> int:
    parser = parser_of(DESCRIPTION, "one seed and few steps, to see that it runs", EPILOG)
    parser.add_argument("--steps", type=int, help="training steps of each run (default: 120)")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2")
    arguments = parser.parse_args()
    arguments.seeds = arguments.seeds or ([0] if arguments.quick else [0, 1, 2])
    if arguments.steps is None:
        arguments.steps = WARM_UP_STEPS + 5 if arguments.quick else 120
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps {arguments.steps}: use more than {WARM_UP_STEPS}, which do not count")
    made, results = provenance(["numpy"]), []
    for policy in POLICIES:
        runs = []
        for seed in arguments.seeds:
            print(f"{policy.name}, seed {seed} ...", file=sys.stderr)
            runs.append(run_policy(policy, arguments.steps, seed))
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        results.append({"policy": policy.name, **medians, "runs": runs})
    show(
        ("policy", *(title for title, _, _ in COLUMNS)),
        [(str(result["policy"]), *(form.format(result[name]) for _, name, form in COLUMNS)) for result in results],
        "Policies of asynchronous generation (medians over seeds)",
    )
    report = {
        "benchmark": "rollouts",
        "command": command(),
        "provenance": made,
        "settings": {
            "servers": SERVERS, "lanes": SLOT_GROUPS * GROUP_SIZE, "group_size": GROUP_SIZE,
            "batch_groups": BATCH_GROUPS, "tokens_per_second": TOKENS_PER_SECOND, "mean_tokens": MEAN_TOKENS,
            "length_sigma": LENGTH_SIGMA, "max_tokens": MAX_TOKENS, "train_share": TRAIN_SHARE,
            "sync_seconds": SYNC_SECONDS,
        },
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "results": results,
    }  # fmt: skip
    write_json(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
