"""Evals: their environments, their held-out items, and that no held-out item is trained."""

import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import StrictRecorder, config_of
from tests.unit.orchestrator.simulation import INSTANT, FakeServer, InMemoryRun, SimulatedEnvironment

from telescope.config import TelescopeConfig
from telescope.environments.types import Advance, EnvironmentInfo, RewardRecord
from telescope.errors import ConfigError, EnvironmentFailure
from telescope.evals.entries import environment_keys
from telescope.evals.runner import EvalResult, SamplesFile, plan_evals
from telescope.inference.base import GenerateRequest
from telescope.orchestrator.evaluation import Evaluation
from telescope.orchestrator.resume import describe_data
from telescope.orchestrator.servers import ServerPool
from telescope.orchestrator.status import RunStatus
from telescope.rollout.exchange import TRAINING
from telescope.rollout.pool import RolloutPool
from telescope.rollout.sample import RolloutSettings, request_seed
from telescope.rollout.trajectory import Turn
from telescope.rollout.worker import RolloutWorker


async def evaluation_of(
    config: TelescopeConfig, environments: Any = None, engines: Sequence[FakeServer] = (), num_workers: int = 1
) -> Evaluation:
    """The evals of a config on engines that are up, one by default."""
    environments = environments or SimulatedEnvironment()
    settings = RolloutSettings.from_config(config)
    plans = await plan_evals(config, environment_keys(config), environments, settings.sampling)
    clients: list[Any] = list(engines) or [FakeServer()]
    status = RunStatus("test", config.number_of_steps)
    rollouts = RolloutPool([RolloutWorker(environments, clients) for _ in range(num_workers)])
    servers = ServerPool(
        clients, clients, rollouts.open_lane(TRAINING, [8] * len(clients)), status,
        start_timeout=30.0, hang_timeout=0.0,
        num_dedicated=config.num_eval_servers if engines else 0, eval_slots_per_server=8,
    )  # fmt: skip

    async def bring_weights(server: int, on_loaded: Callable[[], None], *, fresh: bool) -> None:
        clients[server].loaded_version = max(client.loaded_version for client in clients)
        on_loaded()

    servers.bring_weights = bring_weights
    rollouts.on_engine_failure = servers.close
    for index in range(len(clients)):
        servers.open(index)
    recorder: Any = StrictRecorder()
    made = Evaluation(
        plans, config, rollouts, servers, settings, recorder, status,
        lambda coroutine, name: asyncio.create_task(coroutine, name=name),
    )  # fmt: skip
    made.environments = environments  # type: ignore[attr-defined]
    return made


async def run_all(evaluation: Evaluation, version: int = 0) -> list[Any]:
    for engine in engines_of(evaluation):
        engine.loaded_version = version
    return await evaluation.run_all(version)


def engines_of(evaluation: Evaluation) -> list[FakeServer]:
    return evaluation.servers.clients  # type: ignore[return-value]


def requests_of(evaluation: Evaluation) -> list[GenerateRequest]:
    return [request for engine in engines_of(evaluation) for request in engine.requests]


def test_an_eval_of_a_trained_environment_shares_its_processes() -> None:
    keys = environment_keys(config_of(environments=[{"name": "a", "kwargs": {"n": 3}}], evals=[{"name": "a"}]))
    assert (keys.training, keys.evals) == (["a"], ["a"])
    assert len(keys.specs) == 1
    same = environment_keys(
        config_of(environments=[{"name": "a", "kwargs": {"n": 3}}], evals=[{"name": "a", "kwargs": {"n": 3}}])
    )
    assert same.evals == ["a"]


def test_an_eval_with_other_settings_or_another_name_has_its_own() -> None:
    evals = [{"name": "a", "kwargs": {"n": 4}}, {"name": "b"}]
    keys = environment_keys(config_of(environments=[{"name": "a", "kwargs": {"n": 3}}], evals=evals))
    assert keys.evals == ["eval/a#0", "eval/b#1"]
    assert [spec.identity for spec in keys.specs] == ["a", "eval/a#0", "eval/b#1"]
    assert [spec.kwargs for spec in keys.specs] == [{"n": 3}, {"n": 4}, {}]
    assert keys.specs[0].factory != keys.specs[1].factory, "an eval may be more than an environment"


def test_two_entries_of_one_environment_have_different_keys() -> None:
    environments = [{"name": "a", "kwargs": {"n": 3}}, {"name": "a", "kwargs": {"n": 5}}]
    keys = environment_keys(config_of(environments=environments, evals=[{"name": "a"}]))
    assert keys.training == ["a#0", "a#1"]
    assert keys.evals == ["a#0"]
    assert len({spec.identity for spec in keys.specs}) == len(keys.specs) == 2


async def test_separate_items_are_reserved_at_the_head_of_the_environment_that_serves_them() -> None:
    config = config_of(
        environments=[{"name": "a"}, {"name": "b"}],
        evals=[
            {"name": "a", "num_samples": 5, "separate_eval_samples": True},
            {"name": "a", "num_samples": 9, "separate_eval_samples": True},
            {"name": "b", "num_samples": 7},
        ],
    )
    evaluation = await evaluation_of(config)
    data = describe_data(["a", "b"], [EnvironmentInfo(name, 64) for name in ("a", "b")], evaluation.plans)
    assert data["a"]["held_out"] == 9
    assert data["b"]["held_out"] == 0, "not asked to be separate"
    assert evaluation.held_out_uids == {f"uid {index}" for index in range(9)}


async def test_an_eval_uses_all_items_unless_it_names_a_number() -> None:
    evaluation = await evaluation_of(config_of(evals=[{"name": "b", "num_samples": 3}, {"name": "c"}]))
    assert [len(plan.items) for plan in evaluation.plans] == [3, 64]


async def test_fewer_items_than_num_samples_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"num_samples of 'b' is 1000, and its dataset has 64 items"):
        await evaluation_of(config_of(evals=[{"name": "b", "num_samples": 1000}]))


async def test_reserving_every_item_is_refused_with_the_fields_to_change() -> None:
    config = config_of(evals=[{"name": "arithmetic", "num_samples": 64, "separate_eval_samples": True}])
    with pytest.raises(ConfigError, match=r"evals.*num_samples.*arithmetic.*64"):
        await evaluation_of(config)


@pytest.mark.parametrize("shares", [True, False])
async def test_items_of_a_separate_eval_are_never_trained_whatever_its_name(shares: bool) -> None:
    # The same dataset under two names: only the items' identity is equal.
    name = "arithmetic" if shares else "sums under another name"
    config = config_of(number_of_steps=20, evals=[{"name": name, "num_samples": 40, "separate_eval_samples": True}])
    evaluation = await evaluation_of(config)
    run = InMemoryRun(config, held_out=evaluation.held_out_uids, first_index=40 if shares else 0)
    await run.run()
    held_out = {item.index for item in evaluation.plans[0].items}
    trained = {row["index"] for row in run.recorder.of("groups")}
    assert len(held_out) == 40
    assert trained, "there are items left to train on"
    assert not trained & held_out
    assert not {request.prompt_token_ids[0] - 1 for request in run.engine.requests} & held_out


async def test_an_eval_averages_the_scores_and_records_each_sample() -> None:
    config = config_of(
        evals=[{"name": "arithmetic", "num_samples": 10, "temperature": 0.0, "separate_eval_samples": True}]
    )
    evaluation = await evaluation_of(config)
    (result,) = await run_all(evaluation)
    written: Any = evaluation.recorder
    rows = written.of("samples", status="eval", eval_name="arithmetic")
    assert len(rows) == 10
    turns = written.of("turns")
    assert {(turn["sample_id"], turn["turn"]) for turn in turns} == {(row["sample_id"], 0) for row in rows}
    assert all(turn["num_tokens"] == row["completion_tokens"] > 0 for turn, row in zip(turns, rows, strict=True))
    assert not written.of("tokens"), "a number of samples per step is of those that are trained"
    assert not written.of("groups"), "an eval uses no prompt numbers"
    assert result.accuracy == pytest.approx(sum(row["metrics"]["correct"] for row in rows) / 10)
    assert (result.version, result.num_items, result.num_scored, result.temperature) == (0, 10, 10, 0.0)
    assert result.held_out
    assert all(row["group_id"] < 0 for row in rows), "an id that no prompt has"
    assert len({row["group_id"] for row in rows}) == 10
    assert all(for_eval for _, _, for_eval in evaluation.environments.advanced)  # type: ignore[attr-defined]
    assert {request.temperature for request in requests_of(evaluation)} == {0.0}
    assert len(written.of("spans", name="eval")) == 1
    (row,) = written.of("evals")
    assert (row["status"], row["accuracy"], row["step"], row["servers"]) == ("finished", result.accuracy, -1, [0])
    links = written.of("eval_samples", eval_id=row["eval_id"])
    assert {link["sample_id"] for link in links} == {row["sample_id"] for row in rows}
    assert sorted((link["item"], link["sample_uid"]) for link in links) == [(i, f"uid {i}") for i in range(10)]
    assert evaluation.servers.num_slots_used_by_evals == 0


class TwoTurns(SimulatedEnvironment):
    """The same items as a conversation: after the first answer the environment adds token 9."""

    def __init__(self) -> None:
        super().__init__()
        self.turns, self.answers = True, dict[str, int]()

    async def describe(self, key: str) -> EnvironmentInfo:
        return EnvironmentInfo(key, self.num_items, is_multi_turn=True)

    async def begin(self, rollout: str, key: str, index: int) -> list[int]:
        self.answers[rollout] = 0
        return [index + 1]

    async def respond(self, rollout: str, turn: Turn, *, for_eval: bool = False) -> Advance:
        assert for_eval
        self.answers[rollout] += 1
        if self.answers[rollout] == 1:
            return Advance([9])
        return Advance([], RewardRecord(1.0, {"correct": 1.0}, {}, [], {}))

    def end(self, rollout: str) -> None:
        assert self.answers[rollout] == 2


async def test_a_multi_turn_eval_runs_like_training() -> None:
    config = config_of(evals=[{"name": "arithmetic", "num_samples": 5}])
    evaluation = await evaluation_of(config, TwoTurns())
    (result,) = await run_all(evaluation)
    assert (result.num_scored, result.accuracy) == (5, 1.0)
    written: Any = evaluation.recorder
    assert {row["num_turns"] for row in written.of("samples", status="eval")} == {2}
    second = [request.prompt_token_ids for request in requests_of(evaluation) if len(request.prompt_token_ids) > 1]
    assert len(second) == 5
    assert all(prompt[-1] == 9 for prompt in second), "the environment's reply follows the answer"


async def test_a_sample_that_ends_before_its_first_request_has_no_server() -> None:
    class Unready(SimulatedEnvironment):
        async def begin(self, rollout: str, key: str, index: int) -> list[int]:
            if index == 0:
                raise EnvironmentFailure("no sandbox")
            return await super().begin(rollout, key, index)

    evaluation = await evaluation_of(
        config_of(evals=[{"name": "arithmetic", "num_samples": 2}]), Unready(dataclasses.replace(INSTANT, turns=(1, 2)))
    )
    await run_all(evaluation)
    written: Any = evaluation.recorder
    assert [row["servers"] for row in written.of("evals")] == [[0]]


async def test_an_eval_uses_the_same_seeds_at_every_version() -> None:
    config = config_of(evals=[{"name": "arithmetic", "num_samples": 4}])
    evaluation = await evaluation_of(config)
    await run_all(evaluation, version=0)
    await run_all(evaluation, version=3)
    seeds = {request.prompt_token_ids[0]: request.seed for request in requests_of(evaluation)[:4]}
    assert seeds == {request.prompt_token_ids[0]: request.seed for request in requests_of(evaluation)[4:]}
    assert seeds[1] == request_seed(config.seed, "eval", 0, 0, 0, 0)
    assert len({request.request_id for request in requests_of(evaluation)}) == 8
    assert [result.version for result in evaluation.results] == [0, 3]


async def test_two_evals_of_one_name_keep_their_samples_apart() -> None:
    config = config_of(
        evals=[{"name": "arithmetic", "num_samples": 3}, {"name": "arithmetic", "num_samples": 3, "temperature": 0.0}]
    )
    evaluation = await evaluation_of(config)
    await run_all(evaluation)
    written: Any = evaluation.recorder
    assert len({row["sample_id"] for row in written.of("samples")}) == 6


class Graded(SimulatedEnvironment):
    """Items whose correctness is a function of their index, and whose answers have no other reward."""

    def __init__(self, grade: Callable[[int], float]) -> None:
        super().__init__()
        self.grade = grade

    async def advance(self, key: str, index: int, *arguments: Any, **options: Any) -> Advance:
        return Advance([], RewardRecord(None, {"correct": self.grade(index)}, {}, [], {}))


def fail_below(first: int, message: str = "broken") -> Callable[[int], float]:
    """Right answers, except that the first items raise an error."""

    def grade(index: int) -> float:
        if index < first:
            raise EnvironmentFailure(message)
        return 1.0

    return grade


@pytest.mark.parametrize(("fails", "is_problem"), [(0, False), (2, False), (3, True)])
async def test_a_failed_sample_counts_as_wrong_wherever_the_accuracy_is_shown(fails: int, is_problem: bool) -> None:
    pass_k = {"at_k": {"metrics": ["correct"], "k": [1]}, "pow_k": {"metrics": ["correct"], "k": [1]}}
    config = config_of(
        evals=[{"name": "arithmetic", "num_samples": 10, "pass_k": pass_k}], environment_error_budget=0.2
    )
    evaluation = await evaluation_of(config, Graded(fail_below(fails)))
    (result,) = await run_all(evaluation)
    right = pytest.approx(1 - fails / 10)
    assert (result.num_items, result.num_scored, result.num_failed) == (10, 10 - fails, fails)
    assert result.metrics == dict.fromkeys(("correct", "pass@1/correct", "pass^1/correct"), right)
    assert (result.estimate.mean, result.estimate.num_items, len(result.by_item)) == (right, 10, 10)
    beside = f" of 10 items ({fails} failed)" if fails else " of 10 items"
    assert any(message.endswith(beside) for message in evaluation.status.messages)
    written: Any = evaluation.recorder
    masked = written.of("samples", status="masked")
    assert [(row["eval_name"], row["failure_message"]) for row in masked] == [("arithmetic", "broken")] * fails
    assert (written.of("evals")[0]["accuracy"], written.of("evals")[0]["num_scored"]) == (right, 10 - fails)
    problem = f"eval arithmetic at version 0: {fails} of 10 samples failed and count as wrong; first: broken"
    assert evaluation.problems == [problem] * is_problem


async def test_a_repeated_evaluation_samples_what_the_record_of_the_killed_one_lacks(tmp_path) -> None:
    config = config_of(evals=[{"name": "arithmetic", "num_samples": 10}])
    killed = await evaluation_of(config)
    with SamplesFile(tmp_path / "samples.jsonl", []) as killed.samples:
        await run_all(killed)
    rows: dict[str, Any] = {table: killed.recorder.of(table) for table in ("samples", "eval_samples")}  # type: ignore[attr-defined]
    kept = {"samples": rows["samples"][:5], "eval_samples": rows["eval_samples"][:4]}
    ids = [frozenset(row["sample_id"] for row in kept[table]) for table in kept]
    repeated = await evaluation_of(config)
    with SamplesFile(tmp_path / "samples.jsonl", ids) as repeated.samples:
        (result,) = await run_all(repeated)
    written: Any = repeated.recorder
    assert result.num_scored == 10 == len(kept["eval_samples"]) + len(written.of("eval_samples"))
    every = [row["sample_id"] for row in kept["samples"] + written.of("samples")]
    assert len(set(every)) == len(every), "no id is given twice"


async def test_an_eval_without_any_score_is_reported() -> None:
    broken = Graded(fail_below(64, "KeyError: 'numbers'"))
    evaluation = await evaluation_of(config_of(evals=[{"name": "arithmetic", "num_samples": 2}]), broken)
    assert await run_all(evaluation) == []
    (problem,) = evaluation.problems
    assert re.search(r"arithmetic at version 0 failed: .*none of its 2 .*KeyError", problem)
    assert problem in evaluation.status.messages
    written: Any = evaluation.recorder
    (row,) = written.of("evals")
    assert (row["status"], row.get("accuracy")) == ("failed", None)
    assert "KeyError" in row["error"]


PASS_K = {"at_k": {"metrics": ["correct"], "k": [1, 2, 4]}, "pow_k": {"metrics": ["correct"], "k": [2]}}


async def test_pass_k_samples_every_item_as_often_as_its_largest_k() -> None:
    config = config_of(evals=[{"name": "arithmetic", "num_samples": 3, "pass_k": PASS_K}])
    scored: Counter[int] = Counter()

    def alternate(index: int) -> float:
        scored[index] += 1
        return float(scored[index] % 2 == 0)

    evaluation = await evaluation_of(config, Graded(alternate))
    (result,) = await run_all(evaluation)
    assert (result.num_items, result.num_completions, result.num_scored) == (3, 4, 12)
    # Two of the four samples of every item are right.
    assert result.metrics == pytest.approx(
        {"correct": 0.5, "pass@1/correct": 0.5, "pass@2/correct": 5 / 6, "pass@4/correct": 1.0, "pass^2/correct": 1 / 6}
    )
    assert result.accuracy == 0.5
    assert len({request.seed for request in requests_of(evaluation)}) == 12, "the samples of an item differ"
    written: Any = evaluation.recorder
    rows = written.of("samples", status="eval")
    assert len({row["sample_id"] for row in rows}) == len({row["group_id"] for row in rows}) == 12
    assert [len(written.of("prompts", prompt_key=key)) for key in {row["prompt_key"] for row in rows}] == [1] * 3
    assert evaluation.servers.num_slots_used_by_evals == 0


async def test_a_misspelled_metric_of_pass_k_is_reported_with_the_nearest() -> None:
    wrong = {"at_k": {"metrics": ["corect"], "k": [2]}}
    evaluation = await evaluation_of(config_of(evals=[{"name": "arithmetic", "num_samples": 2, "pass_k": wrong}]))
    assert await run_all(evaluation) == []
    assert "'corect', which no sample has. Did you mean 'correct'?" in evaluation.problems[0]


async def test_a_later_result_has_the_paired_gain_over_the_first() -> None:
    environments = Graded(lambda index: 0.0)
    evaluation = await evaluation_of(config_of(evals=[{"name": "arithmetic", "num_samples": 40}]), environments)
    (before,) = await run_all(evaluation)
    environments.grade = lambda index: float(index < 30)
    (after,) = await run_all(evaluation, version=3)
    assert before.gain is None
    assert (before.estimate.low, before.estimate.high) == (0.0, 0.0)
    assert (after.estimate.mean, after.gain.mean, after.gain.num_items) == (0.75, 0.75, 40)
    assert after.gain.low < 0.75 < after.gain.high
    written: Any = evaluation.recorder
    assert len({row["group_id"] for row in written.of("samples")}) == 80


def test_accuracy_is_the_reward_of_an_environment_that_names_no_correctness() -> None:
    result = EvalResult("a", 0, 2, 2, 1.0, {"reward": 0.5}, 0.1, True)
    assert result.accuracy == 0.5
    assert dataclasses.replace(result, metrics={"reward": 0.5, "correct": 0.25}).accuracy == 0.25
