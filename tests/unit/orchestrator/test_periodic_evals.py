"""Evals during training run on dedicated servers, each at one policy version, and delay no other part of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import config_of
from tests.unit.orchestrator.simulation import FakeServer, InMemoryRun, SimulatedEnvironment
from tests.unit.orchestrator.test_evaluation import Graded, evaluation_of
from tests.unit.rollout.fakes import tick

from telescope.environments.types import Advance
from telescope.errors import EnvironmentFailure
from telescope.orchestrator import servers as servers_module
from telescope.orchestrator.evaluation import Evaluation
from telescope.orchestrator.run_state import RunState
from telescope.record.reader import Run
from telescope.record.recorder import Recorder

EVAL = {"name": "arithmetic", "num_samples": 12, "eval_every": 2}


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "POLL_SECONDS", 0.004)


class Training:
    """Evals and steps of a run with `num_servers` servers, `dedicated` of them for evals."""

    def __init__(
        self, *evals: dict[str, Any], num_servers: int = 2, dedicated: int = 1, num_workers: int = 1, **fields: Any
    ) -> None:
        self.num_workers = num_workers
        self.config = config_of(
            evals=list(evals or [EVAL]), inference_num_workers=num_servers, eval_num_servers=dedicated,
            number_of_steps=100, **fields,
        )  # fmt: skip
        self.engines = [FakeServer() for _ in range(num_servers)]
        self.tasks: list[asyncio.Task[Any]] = []
        self.step = 0

    async def start(self, environments: Any = None) -> Training:
        self.evaluation = await evaluation_of(self.config, environments, self.engines, self.num_workers)
        self.evaluation.spawn = self.spawn
        self.servers = self.evaluation.servers
        self.watching = asyncio.create_task(self.servers.watch())
        return self

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.create_task(coroutine, name=name))
        return self.tasks[-1]

    async def train(self, until: int) -> None:
        """Finishes steps: each syncs the servers that are not leased, then starts the due evals."""
        while self.step < until:
            self.step += 1
            for index in self.servers.synced:
                self.engines[index].loaded_version = self.step
            await self.evaluation.start_due(self.step)
            await tick(30)

    async def fail(self, until: int, *, restarts: int = 1) -> None:
        """Lets the server of an eval fail after these steps, and come back after so many restarts."""
        engine = self.engines[1]
        engine.gate.clear()
        await self.train(until)
        engine.restarts, engine.fails = restarts, True
        engine.gate.set()
        await tick(5)
        engine.fails = False
        await self.ended()

    async def ended(self) -> None:
        async with asyncio.timeout(5):
            await asyncio.gather(*self.tasks)

    async def ended_all(self) -> None:
        """As `ended`, after cancelled ones too."""
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def rows(self, table: str, **values: Any) -> list[dict[str, Any]]:
        recorder: Any = self.evaluation.recorder
        return recorder.of(table, **values)  # type: ignore[no-any-return]


async def test_an_eval_slower_than_its_interval_delays_only_itself_and_has_one_version() -> None:
    training = await Training().start()
    slow = training.engines[1]
    slow.gate.clear()
    await training.train(until=5)  # returns although the eval of step 2 has not answered once
    assert [engine.loaded_version for engine in training.engines] == [5, 2], "an eval holds its server's weights"
    status = training.evaluation.status
    assert status.components["eval arithmetic"] == "version 2: 0/12 samples"
    assert status.eval_total == 0, "the progress bar is that of training"
    (skipped,) = training.rows("evals")
    assert (skipped["version"], skipped["status"]) == (4, "skipped")
    assert training.evaluation.problems == [
        "eval arithmetic at version 4 was skipped: the last eval on its servers is still running"
    ]
    assert training.evaluation.problems[0] in training.evaluation.status.messages
    slow.gate.set()
    await training.ended()
    await training.train(until=6)
    await training.ended()
    assert [(row["version"], row["status"]) for row in training.rows("evals")][1:] == [(2, "finished"), (6, "finished")]
    for version in (2, 6):
        links = {row["sample_id"] for row in training.rows("eval_samples", eval_id=f"eval0-arithmetic-v{version}")}
        samples = [row for row in training.rows("samples") if row["sample_id"] in links]
        assert {(row["start_version"], row["end_version"]) for row in samples} == {(version, version)}
        assert len(samples) == 12
    assert not training.engines[0].requests, "rollouts' servers serve no evals"


async def test_a_server_that_missed_a_sync_receives_the_weights_before_its_next_eval() -> None:
    training = await Training().start()
    training.engines[1].gate.clear()
    await training.train(until=3)
    training.engines[1].gate.set()
    await training.ended()
    training.engines[0].loaded_version = 4  # the eval ends during this sync, so its server is not in it
    await training.evaluation.start_due(4)
    await training.ended()
    assert [result.version for result in training.evaluation.results] == [2, 4]
    assert training.engines[1].loaded_version == 4


async def test_rollouts_never_get_a_slot_of_a_dedicated_server() -> None:
    training = await Training(num_servers=3).start()
    slots = training.servers.slots
    assert slots.up == [True, True, False]
    await training.train(until=2)
    assert slots.up == [True, True, False]
    await training.ended()
    training.servers.close(2, "a test")
    training.servers.open(2)
    assert slots.up == [True, True, False]


async def test_every_rollout_worker_has_slots_of_the_servers_of_an_eval() -> None:
    many = {**EVAL, "num_samples": 60}
    training = await Training(many, num_servers=4, num_workers=4).start()
    await training.train(until=2)
    await training.ended()
    (result,) = training.evaluation.results
    assert (result.num_scored, len(training.engines[3].requests)) == (60, 60)


async def test_samples_of_an_eval_move_to_the_servers_that_keep_its_version() -> None:
    many = {**EVAL, "num_samples": 60}
    training = await Training(many, num_servers=3, dedicated=2, num_workers=16).start()
    training.engines[1].gate.clear()
    training.engines[2].gate.clear()
    await training.train(until=3)
    training.engines[1].gone = True
    training.engines[2].gate.set()
    training.engines[1].fails = True
    training.engines[1].gate.set()
    await training.ended()
    (result,) = training.evaluation.results
    assert (result.version, result.num_scored) == (2, 60)


async def test_evals_with_servers_of_their_own_do_not_wait_for_each_other() -> None:
    quick = {**EVAL, "eval_every": 1, "num_samples": 2}
    training = await Training(EVAL, quick, num_servers=3, dedicated=2).start()
    training.engines[1].gate.clear()
    await training.train(until=4)
    assert [(row["number"], row["version"]) for row in training.rows("evals", status="finished")] == [
        (1, 1), (1, 2), (1, 3), (1, 4)
    ]  # fmt: skip
    assert [(row["number"], row["version"]) for row in training.rows("evals", status="skipped")] == [(0, 4)]
    training.engines[1].gate.set()
    await training.ended()
    assert {row["name"] for row in training.rows("evals")} == {"arithmetic"}
    assert "arithmetic#0 at version 2: accuracy" in " ".join(training.evaluation.status.messages)
    names = {point.name for point in training.evaluation.points()}
    assert names == {point.name for point in training.evaluation.status.health.history.evals}, "as after a resume"


async def test_an_eval_whose_server_restarts_while_training_goes_on_is_reported_as_failed() -> None:
    training = await Training().start()
    await training.fail(until=3)
    (problem,) = training.evaluation.problems
    assert "at version 2 failed" in problem and "no server has version 2 any more" in problem
    assert training.engines[1].loaded_version == 3, "it came back with the trainer's weights"
    await training.train(until=4)
    await training.ended()
    assert [result.version for result in training.evaluation.results] == [4]


async def test_items_are_sampled_again_when_a_server_comes_back_at_the_same_version() -> None:
    training = await Training().start()
    await training.fail(until=2)
    (result,) = training.evaluation.results
    assert (result.version, result.num_scored) == (2, 12)
    assert not training.evaluation.problems


async def test_a_failed_request_does_not_give_newer_weights_to_the_server_of_a_running_eval() -> None:
    training = await Training().start()
    await training.fail(until=3, restarts=0)
    assert [(result.version, result.num_scored) for result in training.evaluation.results] == [(2, 12)]
    assert training.engines[1].loaded_version == 2


async def test_an_eval_that_raises_does_not_end_the_others_or_training() -> None:
    class Broken(SimulatedEnvironment):
        async def advance(self, key: str, *arguments: Any, **options: Any) -> Advance:
            if key == "eval/broken#0":
                raise EnvironmentFailure("KeyError: 'numbers'")
            return await super().advance(key, *arguments, **options)

    training = await Training({**EVAL, "name": "broken"}, EVAL).start(Broken())
    await training.train(until=2)
    await training.ended()
    assert [(row["name"], row["status"]) for row in training.rows("evals")] == [
        ("broken", "failed"), ("arithmetic", "finished")
    ]  # fmt: skip
    assert "KeyError: 'numbers'" in training.evaluation.problems[0]


async def test_the_evals_after_training_supersede_those_that_are_still_running() -> None:
    training = await Training().start()
    training.engines[1].gate.clear()
    await training.train(until=3)
    finishing = asyncio.create_task(training.evaluation.run_all(3))
    await tick(3)
    training.engines[1].gate.set()
    (result,) = await finishing
    assert result.version == 3
    assert {row["server"] for row in training.rows("samples", step=2)} == {0, 1}, "all servers serve the last evals"
    cancelled, finished = training.rows("evals")
    assert (cancelled["version"], cancelled["status"]) == (2, "cancelled")
    assert "superseded by the one at version 3" in cancelled["error"]
    assert finished["servers"] == [0, 1]


async def test_a_restart_of_the_trainer_ends_the_evals_of_lost_weights_only() -> None:
    training = await Training(EVAL, {**EVAL, "eval_every": 3}, num_servers=3, dedicated=2).start()
    await training.train(until=1)
    training.engines[1].gate.clear()
    training.engines[2].gate.clear()
    await training.train(until=3)
    await training.evaluation.continue_after(2)
    assert [(row["version"], row["status"]) for row in training.rows("evals")] == [(3, "cancelled")]
    assert training.servers.synced == [0, 2]
    training.engines[1].gate.set()
    await training.evaluation.finish()  # does not wait for the cancelled eval
    await training.ended_all()
    assert [result.version for result in training.evaluation.results] == [2]
    await training.evaluation.continue_after(1)
    assert training.evaluation.results == []


async def test_an_eval_that_is_cancelled_before_it_begins_holds_no_server() -> None:
    training = await Training().start()
    await training.evaluation.start_due(2)
    await training.evaluation.cancel("a test")
    assert training.servers.synced == [0, 1]
    await training.train(until=2)
    await training.ended_all()
    assert [result.version for result in training.evaluation.results] == [2]


async def test_running_evals_finish_when_none_comes_after_training() -> None:
    training = await Training(eval_after_training=False).start()
    training.engines[1].gate.clear()
    await training.train(until=3)
    finishing = asyncio.create_task(training.evaluation.finish())
    await tick(3)
    assert not finishing.done()
    assert training.evaluation.status.phase == "waiting for running evals"
    training.engines[1].gate.set()
    await finishing
    assert [result.version for result in training.evaluation.results] == [2]


async def test_start_and_end_evals_use_the_dedicated_servers_only_if_asked() -> None:
    training = await Training(eval_start_end_use_all_servers=False).start()
    await training.evaluation.run_all(0)
    assert {row["server"] for row in training.rows("samples")} == {1}


async def test_a_dedicated_server_takes_over_when_no_other_is_left() -> None:
    training = await Training().start()
    training.engines[1].gate.clear()
    await training.train(until=2)
    training.engines[0].state = training.engines[0].error = "failed"
    async with asyncio.timeout(5):
        while not training.servers.slots.up[1]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    training.engines[1].gate.set()
    await training.ended()
    assert training.servers.up == training.servers.synced == [1]
    assert "at version 2 failed" in training.evaluation.problems[0]
    await training.train(until=4)
    assert "skipped: its servers serve rollouts" in training.evaluation.problems[1]


async def test_without_dedicated_servers_nothing_runs_during_training() -> None:
    training = await Training(dedicated=0).start()
    await training.train(until=6)
    assert not training.tasks and not training.rows("evals")


async def test_gains_after_a_resume_refer_to_the_first_attempts_baseline() -> None:
    environments = Graded(lambda index: 0.0)
    first = await Training().start(environments)
    await first.evaluation.run_all(0)
    environments.grade = lambda index: float(index < 3)
    await first.train(until=2)
    await first.ended()
    assert [bool(result.by_item) for result in first.evaluation.results] == [True, False], "only baselines need items"
    state = RunState.load_state_dict(RunState(evals=first.evaluation.results).state_dict())
    second = await Training().start(environments)
    second.evaluation.results = state.evals
    environments.grade = lambda index: float(index < 9)
    await second.train(until=4)
    await second.ended()
    assert [result.gain and result.gain.mean for result in second.evaluation.results] == [None, 0.25, 0.75, 0.75]


def test_an_attempt_knows_which_evals_earlier_ones_have_finished(tmp_path: Any) -> None:
    with Recorder(tmp_path) as recorder:
        for number, version, status in ((0, 2, "finished"), (1, 2, "failed"), (1, 4, "finished")):
            row = {"number": number, "version": version, "status": status, "step": version - 1, "source": "live"}
            recorder.write("evals", row)
        recorder.write("evals", {**row, "number": 2, "version": 2, "source": "standalone"})
    record = Run(tmp_path)
    assert record.values("evals", "number", version=2, status="finished", source="live") == {0}


async def test_rollouts_and_training_do_not_wait_for_an_eval() -> None:
    config = config_of(
        number_of_steps=6, inference_num_workers=2, eval_num_servers=1, evals=[{**EVAL, "eval_every": 1}]
    )  # fmt: skip
    engines = [FakeServer(), FakeServer()]
    engines[1].gate.clear()
    evaluation: Evaluation = await evaluation_of(config, None, engines)
    tasks: list[asyncio.Task[Any]] = []
    evaluation.spawn = lambda coroutine, name: tasks.append(asyncio.create_task(coroutine)) or tasks[-1]  # type: ignore

    async def after_step(step: int, state: Callable[[], RunState]) -> None:
        for index in evaluation.servers.synced:
            engines[index].loaded_version = step
        await evaluation.start_due(step)

    run = InMemoryRun(config, after_step=after_step)
    await run.run()
    assert len(run.trainer.steps) == 6
    assert len(tasks) == 1 and not tasks[0].done(), "one eval ran all the time and has not answered"
    assert [row["version"] for row in evaluation.recorder.of("evals")] == [2, 3, 4, 5]  # type: ignore[attr-defined]
    assert run.status.num_tokens_generated == 3 * len(run.engine.requests), "tokens of evals are not rollouts'"
    await evaluation.cancel("the test ended")
