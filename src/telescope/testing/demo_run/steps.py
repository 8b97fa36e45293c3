"""One generated training step: its groups and samples with their times, and the spans of trainer, engines and sync."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from telescope.orchestrator.groups import Group, Signal
from telescope.orchestrator.prompt_sampler import SampledPrompt
from telescope.rollout.trajectory import Trajectory
from telescope.testing.demo_run.curves import Curves
from telescope.testing.demo_run.tasks import TASKS, Problem, problems
from telescope.trainer.batch import SampleTokens, Span, StepResult

GROUP_SIZE = 8
NUM_SERVERS, NUM_RANKS = 4, 4
WEIGHTS = {"countdown": 0.5, "algebra": 0.3, "calculator_agent": 0.2}
"""Share of each task among the prompts."""

MOST_GROUPS = 4
"""Groups that are generated for a step, for each group that is trained."""

STALE_EVERY = 9
"""Steps between two groups that become too old."""

NUM_TOKENS_SAMPLES = 4
"""Samples of a step whose tokens are recorded."""

FAILURE_SHARE = 0.0015

QUEUE, PREFILL = 0.04, 0.10
"""Shares of a request's time."""

SYNC_SECONDS = 0.12
"""Time for the new weights at the end of a step."""

TOOL_SECONDS = 0.012
REWARD_SECONDS = 0.03


@dataclass
class Step:
    """What happened until a step was trained."""

    number: int
    start: float
    end: float
    waited: float
    kept: list[Group] = field(default_factory=list)
    discarded: list[Group] = field(default_factory=list)
    """Groups with equal rewards."""
    withdrawn: list[Group] = field(default_factory=list)
    """Groups that became too old. Their last samples are cancelled."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    """Rows of weight syncs."""
    result: StepResult = field(default_factory=lambda: StepResult({}, []))
    sync_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def groups(self) -> list[Group]:
        """All groups, in the order of their ids."""
        return sorted([*self.kept, *self.discarded, *self.withdrawn], key=lambda group: group.group_id)


class Simulation:
    """Makes each step from the seed and its number. Times are Unix seconds after `origin`."""

    def __init__(self, curves: Curves, *, origin: float, num_groups: int = 4) -> None:
        self.curves = curves
        self.origin = origin
        self.num_groups = num_groups
        self.ids_per_step = MOST_GROUPS * num_groups

    def step(self, number: int) -> Step:
        """Returns a step."""
        curves = self.curves
        chosen = random.Random(f"{curves.seed} {number}")
        start = self.origin + curves.start(number)
        made = Step(number, start, self.origin + curves.start(number + 1), curves.wait(number))
        servers = [server for server in range(NUM_SERVERS) if not curves.is_down(server, number)]
        by_server: dict[int, list[Group]] = {server: [] for server in servers}
        for place in range(self.ids_per_step):
            if len(made.kept) == self.num_groups:
                break
            group = self._group(chosen, number, number * self.ids_per_step + place)
            by_server[servers[place % len(servers)]].append(group)
            if number % STALE_EVERY == 4 and place == 0 and number:
                made.withdrawn.append(group)
            elif (signal := group.signal()) is Signal.ZERO_ADVANTAGE:
                made.discarded.append(group)
            elif signal is Signal.USABLE:
                made.kept.append(group)
        before = self.origin + curves.start(max(0, number - 1)) + (curves.wait(number - 1) if number else 0.0)
        for server, groups in by_server.items():
            _place(groups, server, before, start + made.waited, made)
        if made.withdrawn:
            for sample in made.withdrawn[0].samples[-3:]:
                sample.cancelled, sample.reward = True, None
        draw = curves.draw(number)
        self._sync(made, draw)
        self._train(made, draw)
        return made

    def _group(self, chosen: random.Random, step: int, group_id: int) -> Group:
        task = chosen.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
        problem = chosen.choice(problems("train")[task])
        sampled = SampledPrompt(group_id, TASKS.index(task), problem.index, group_id // 300)
        group = Group(sampled, task, problem.prompt, GROUP_SIZE, max(0, step - 1), 0.0)
        for index in range(GROUP_SIZE):
            sample = self.sample(chosen, problem, step, group.sample_id(index), group_id, index)
            if chosen.random() < FAILURE_SHARE:
                sample.failure_kind, sample.reward = "environment", None
                sample.failure_message = "TimeoutError: compute_reward took longer than 120 s"
            group.samples.append(sample)
        return group

    def sample(
        self, chosen: random.Random, problem: Problem, step: int, sample_id: str, group_id: int, index: int
    ) -> Trajectory:
        """Returns a scored sample without times, of the policy after `step` steps."""
        task = problem.task
        if chosen.random() < self.curves.looping(step) * (0.4 if task == "calculator_agent" else 1.0):
            answer = problem.looping
        else:
            is_right = chosen.random() < self.curves.chance(task, step, problem.difficulty)
            answer = chosen.choice(problem.right if is_right else problem.wrong)
        made = Trajectory(sample_id, group_id, index, task, reward=answer.reward)
        made.compression_ratio = 14.0 if answer is problem.looping else 1.5 + 0.3 * chosen.random()
        temperature = 1.35 - 0.5 * self.curves.skill(task, step)
        for turn in answer.turns:
            generated, scale = turn.generation, np.float32(temperature * (0.8 + 0.4 * chosen.random()))
            span = (step, 0, len(generated.token_ids_N))
            generation = replace(generated, logprobs_N=generated.logprobs_N * scale, version_spans=[span])
            made.turns.append(replace(turn, generation=generation))
        return made

    def _sync(self, made: Step, draw: np.random.Generator) -> None:
        """Adds the spans and metrics of the weight sync."""
        pauses, transfers = 0.11 + 0.02 * draw.random(NUM_SERVERS), 0.06 + 0.01 * draw.random(NUM_SERVERS)
        size = 3_440_000_000
        for server, (pause, transfer) in enumerate(zip(pauses.tolist(), transfers.tolist(), strict=True)):
            end = made.end - 0.01 * draw.random()
            about = {"version": str(made.number + 1), "pause_seconds": f"{pause:.6f}", "bytes": str(size)}
            intervals: tuple[tuple[str, float, float, dict[str, str]], ...] = (
                ("weight_sync", end - pause, end, about),
                ("weight_transfer", end - pause + 0.02, end - pause + 0.02 + transfer, {}),
            )
            for name, start, stop, attributes in intervals:
                made.spans.append({
                    "name": name, "component": "weights", "server": server, "step": made.number, "start": start,
                    "end": stop, "attributes": attributes,
                })  # fmt: skip
            made.sync_metrics[f"weight_sync/pause_seconds/server_{server}"] = pause
            made.sync_metrics[f"weight_sync/transfer_seconds/server_{server}"] = transfer
        made.sync_metrics |= {
            "timing_weight_sync_total": float(pauses.max()) + 0.02,
            "timing_weight_sync_inference_total": float(pauses.max()),
            "timing_weight_sync_trainer_total": float(transfers.max()) + 0.02, "weight_sync/bytes": float(size),
            "weight_sync/servers": float(NUM_SERVERS), "weight_sync/background": 0.0,
        }  # fmt: skip

    def _train(self, made: Step, draw: np.random.Generator) -> None:
        """Adds the trainer's metrics, spans and tokens."""
        samples = [sample for group in made.kept for sample in group.usable_samples]
        num_tokens = sum(sample.num_completion_tokens for sample in samples)
        ages = [made.number - sample.version_range[0] for sample in samples]
        metrics = self.curves.training_metrics(made.number, num_tokens, float(np.mean(ages)) if ages else 0.0)
        spans = list(_trainer_spans(made, draw))
        for name in TIMED:
            of_ranks = np.zeros(NUM_RANKS)
            for span in spans:
                of_ranks[span.rank] += span.end - span.start if span.name == name else 0.0
            slowest = metrics[f"timing_{name}_total"] = float(of_ranks.max())
            metrics[f"timing_{name}_rank_mean"] = float(of_ranks.mean())
            if name not in ("gradient_norm", "optimizer"):
                metrics[f"timing_{name}_microbatch_mean"] = slowest / MICRO_BATCHES
        few = samples[:: max(1, len(samples) // NUM_TOKENS_SAMPLES)][:NUM_TOKENS_SAMPLES]
        made.result = StepResult(metrics, spans, [_tokens(sample, draw) for sample in few])


def _place(groups: Sequence[Group], server: int, begin: float, end: float, made: Step) -> None:
    """Gives the samples of one server their lanes and times. The times are between `begin` and `end`."""
    # A sample takes the time of its tokens, and an overhead for each turn.
    lengths = [
        [each.num_completion_tokens + 12.0 * len(each.turns) + 8.0 for each in group.samples] for group in groups
    ]
    totals = [sum(column) for column in zip(*lengths, strict=True)] or [1.0]
    # Lanes with fewer tokens are somewhat slower, so that all end soon before the batch is complete.
    seconds = [0.96 * (end - begin) / (0.35 * max(totals) + 0.65 * total) for total in totals]
    slowest = max(pace * total for pace, total in zip(seconds, totals, strict=True))
    seconds = [pace * 0.96 * (end - begin) / slowest for pace in seconds]
    at = [begin + 0.002 * lane for lane in range(GROUP_SIZE)]
    for group, group_lengths in zip(groups, lengths, strict=True):
        group.opened_at = min(at) - 0.001
        for lane, (sample, length) in enumerate(zip(group.samples, group_lengths, strict=True)):
            sample.server_index, sample.slot, sample.started_at = server, lane, at[lane]
            _set_times(sample, at[lane], length * seconds[lane], made)
            at[lane] = sample.finished_at + 0.002
        group.finished_at = max(sample.finished_at for sample in group.samples)
        group.start_version = min(sample.version_range[0] for sample in group.samples)


def _set_times(sample: Trajectory, start: float, seconds: float, made: Step) -> None:
    """Sets the times of a sample's turns. Splits their tokens where the weights changed."""
    tokens = max(1, sample.num_completion_tokens)
    generating = seconds - REWARD_SECONDS - TOOL_SECONDS * (len(sample.turns) - 1)
    at = start
    for turn in sample.turns:
        turn.server, turn.slot = sample.server_index, sample.slot
        turn.started_at = at
        turn.ended_at = at + max(0.002, generating * len(turn.generation.token_ids_N) / tokens)
        count, newest = len(turn.generation.token_ids_N), made.number
        share = (made.start - turn.started_at) / (turn.ended_at - turn.started_at)
        border = min(count, max(0, round(share * count))) if newest else 0
        spans = [(newest - 1, 0, border), (newest, border, count)]
        turn.generation.version_spans = [span for span in spans if span[1] < span[2]]
        at = turn.ended_at + TOOL_SECONDS
    sample.generated_at = sample.turns[-1].ended_at
    sample.finished_at = max(start + seconds, sample.generated_at + 0.001)


def engine_spans(sample: Trajectory) -> Iterator[dict[str, Any]]:
    """Yields the engine's spans of a sample: queue, prefill and decode of each request."""
    for place, turn in enumerate(sample.turns):
        seconds = turn.ended_at - turn.started_at
        edges = [turn.started_at + share * seconds for share in (0.0, QUEUE, QUEUE + PREFILL, 1.0)]
        attributes = {"lane": str(sample.slot), "turn": str(place), "tokens": str(len(turn.generation.token_ids_N))}
        for name, begin, end in zip(("queue", "prefill", "decode"), edges, edges[1:], strict=False):
            first_token = {"first_token_seconds": f"{end - edges[0]:.6f}"} if name == "prefill" else {}
            yield {
                "name": name, "component": "inference", "server": sample.server_index, "sample_id": sample.sample_id,
                "start": begin, "end": end, "attributes": {**attributes, **first_token},
            }  # fmt: skip


MICRO_BATCHES = 2
PHASES = (
    ("prepare_tensors", 0.004), ("data_to_device", 0.006), ("forward", 0.26), ("compute_entropy", 0.07),
    ("loss_computation", 0.01), ("backward", 0.58), ("compute_kl", 0.01),
)  # fmt: skip
"""Operations of a micro-batch, and their shares of its time."""

TIMED = (*(name for name, _ in PHASES), "gradient_reduction", "gradient_norm", "optimizer")


def _trainer_spans(made: Step, draw: np.random.Generator) -> Iterator[Span]:
    begin = made.start + made.waited
    busy = made.end - 0.16 - begin
    for rank in range(NUM_RANKS):
        at = begin + 0.002 * draw.random()
        yield Span("waiting_for_data", made.start, at, rank)
        step_begin, speed = at, 0.93 + 0.06 * draw.random()
        for micro_batch in range(MICRO_BATCHES):
            seconds = 0.46 * busy * speed
            for name, share in PHASES:
                yield Span(name, at, at + share * seconds, rank, micro_batch)
                if name == "backward":
                    middle = at + 0.35 * share * seconds
                    yield Span("gradient_reduction", middle, at + share * seconds, rank, micro_batch)
                at += share * seconds
        at = max(at, begin + 0.93 * busy)
        yield Span("gradient_norm", at, at + 0.01 * busy, rank)
        yield Span("optimizer", at + 0.01 * busy, at + 0.06 * busy, rank)
        yield Span("step", step_begin, at + 0.06 * busy, rank)
        yield Span("weight_sync", made.end - SYNC_SECONDS, made.end - 0.03, rank)
        yield Span("weight_broadcast_gather", made.end - SYNC_SECONDS, made.end - 0.06, rank)


def _tokens(sample: Trajectory, draw: np.random.Generator) -> SampleTokens:
    (trained, *_) = sample.to_train_samples()
    mask = trained.trained_L
    noise = draw.normal(0, 0.01, trained.length)
    trainer, entropy = (np.full(trained.length, np.nan, dtype=np.float32) for _ in range(2))
    trainer[mask] = np.minimum(0, (trained.engine_logprob_L + noise)[mask])
    entropy[mask] = (-1.4 * trained.engine_logprob_L * (0.6 + 0.8 * draw.random(trained.length)))[mask]
    return SampleTokens(
        sample.sample_id, trained.token_ids_L, mask, trained.engine_logprob_L, trained.version_L, trainer, entropy
    )
