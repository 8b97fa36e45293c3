"""Rollout workers as Ray actors, with user code that ends, blocks or fills their process."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.documented_metrics import undocumented
from tests.fakes.engine import FakeEngineSettings, FakeRequest
from tests.fakes.server import FakeEngineServer
from tests.integration.environments.conftest import ENVIRONMENTS, save_byte_tokenizer
from tests.processes import eventually

from telescope.cluster import rollout_group
from telescope.cluster.ray_cluster import Cluster, connect, disconnect
from telescope.cluster.reaper import Reaper
from telescope.cluster.rollout_group import RolloutGroup, memory_allowance
from telescope.config import TelescopeConfig
from telescope.environments.types import EnvironmentSpec
from telescope.errors import InfrastructureError, UserError
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.rollout import sandbox_rows
from telescope.rollout.exchange import TRAINING
from telescope.rollout.pool import RolloutPool
from telescope.rollout.sample import RolloutSettings, RolloutTask
from telescope.rollout.trajectory import Trajectory
from telescope.sandbox import get_provider
from telescope.sandbox.ledger import SandboxLedger, reap

FINE = "fine"
FIRST_VERSION = 3
"""Policy version of the weights that the server starts with, as when a checkpoint is evaluated."""


@dataclass
class Ground:
    """A cluster of Ray, and a tokenizer whose ids are the bytes of a text."""

    cluster: Cluster
    folder: Path
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("rollout-workers")
    save_byte_tokenizer(folder / "tokenizer")
    with Reaper() as reaper:
        config = config_of(folder)
        cluster = connect(config, folder, reaper.directory, local_cpus=2, local_gpus=0)
        yield Ground(cluster, folder, AutoTokenizer.from_pretrained(folder / "tokenizer"))
        disconnect(cluster, config)


def config_of(folder: Path, **fields: Any) -> TelescopeConfig:
    defaults: dict[str, Any] = {
        "model": str(folder / "tokenizer"), "environments": [{"name": "hostile"}],
        "environments_path": [str(ENVIRONMENTS)], "environment_timeout_seconds": 20.0, "rollout_num_workers": 1,
        "group_size": 2, "inference_num_workers": 1, "max_tokens": 512, "max_model_len": 4096, "seq_len": 4096,
        "use_wandb": False,
    }  # fmt: skip
    return TelescopeConfig.model_validate({**defaults, **fields})


@dataclass
class Workers:
    """Started workers, and the deeds that the model's answers name, by item."""

    group: RolloutGroup
    pool: RolloutPool
    deeds: dict[int, str]
    settings: RolloutSettings
    run_dir: Path
    name: str
    """Of the environment."""

    async def run(self, *deeds: str, samples: int = 1) -> list[list[Trajectory]]:
        """Runs a group for each deed, at the same time."""
        items = [len(self.deeds) + number for number in range(len(deeds))]
        self.deeds.update(zip(items, deeds, strict=True))
        async with asyncio.timeout(120):
            return await asyncio.gather(*(self._group(item, samples) for item in items))

    async def _group(self, item: int, samples: int) -> list[Trajectory]:
        prompt = await self.pool.prepare(self.name, item)
        tasks = [
            RolloutTask(f"{item}-{n}", item, n, self.name, self.name, item, prompt.token_ids, (0, item, n))
            for n in range(samples)
        ]
        return await self.pool.run(tasks, self.settings)

    @property
    def num_replaced(self) -> int:
        return sum(handle.num_starts - 1 for handle in self.group.handles)

    def log(self, index: int = 0) -> bytes:
        return (self.run_dir / "logs" / f"rollout-{index}.log").read_bytes()


@asynccontextmanager
async def workers(
    ground: Ground, run_dir: Path, environment: str = "hostile", write: Any = lambda table, row: None, **fields: Any
) -> AsyncIterator[Workers]:
    config = config_of(ground.folder, environments=[{"name": environment}], **fields)
    deeds: dict[int, str] = {}

    def answer(request: FakeRequest) -> list[int]:
        text = ground.tokenizer.decode(request.prompt)
        return ground.encode(deeds[int(text.partition("question ")[2].split("<")[0])])

    group = RolloutGroup(config, [EnvironmentSpec(environment)], run_dir, ground.cluster, write)
    async with FakeEngineServer(FakeEngineSettings(tokens_per_second=0.0), answer=answer) as server:
        try:
            await group.start()
            await group.connect([(server.url, server.secret)], lambda: [FIRST_VERSION], FIRST_VERSION)
            pool = RolloutPool(group.handles, infos={environment: group.infos[0]}, seconds=1.0, interval=0.01)
            slots = pool.open_lane(TRAINING, [64 * config.rollout_num_workers], 2)
            slots.set_up(0, True)
            yield Workers(group, pool, deeds, RolloutSettings.from_config(config), run_dir, environment)
            await pool.close()
        finally:
            await group.stop()


def rewards(groups: list[list[Trajectory]]) -> list[float | None]:
    return [sample.reward.total_reward if sample.reward else None for group in groups for sample in group]


def num_processes(word: str) -> int:
    return sum(word in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


async def test_a_worker_runs_rollouts_and_loads_neither_torch_nor_transformers(ground, tmp_path):
    async with workers(ground, tmp_path) as run:
        groups = await run.run(*[FINE] * 50, samples=4)
        assert rewards(groups) == [1.0] * 200
        assert {s.totals.version_range for group in groups for s in group} == {(FIRST_VERSION, FIRST_VERSION)}
        assert os.getpid() not in {s.reward.sample_metrics["pid"] for group in groups for s in group if s.reward}
        titles = {" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)}
        assert "ray::RolloutActor" in str(titles) and "ray::IDLE" not in str(titles), "no process that nothing uses"
        assert run.num_replaced == 0


async def test_user_code_that_crashes_its_process_three_times_fails_alone(ground, tmp_path):
    async with workers(ground, tmp_path, rollout_num_workers=2) as run:
        # Of those that are lost with it twice, one after the other runs a third time.
        groups = await run.run("crash", *["wait 0.3"] * 8, *[FINE] * 20)
        (culprit,) = groups[0]
        assert culprit.failure_kind == "environment" and "3 rollout workers ended" in (culprit.failure_message or "")
        assert rewards(groups[1:]) == [1.0] * 28
        assert run.num_replaced == 3


async def test_a_worker_that_is_killed_costs_its_unfinished_samples_a_retry(ground, tmp_path):
    async with workers(ground, tmp_path) as run:
        running = asyncio.ensure_future(run.run(*["wait 2"] * 10))
        (first,) = (await run.run(FINE))[0]
        await asyncio.sleep(0.5)  # meanwhile the worker reports what the others have sampled
        os.kill(int(first.reward.sample_metrics["pid"]), signal.SIGKILL)
        groups = await running
        assert rewards(groups) == [1.0] * 10
        assert {sample.num_infrastructure_retries for group in groups for sample in group} == {1}
        lost = [sample.lost_conversations for group in groups for sample in group]
        assert {len(tokens) for tokens in lost} == {1} and any(tokens > [0] for tokens in lost)


async def test_user_code_that_blocks_its_process_is_found_by_its_silence(ground, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_group, "SILENCE_SECONDS", 1.0)
    async with workers(ground, tmp_path, environment_timeout_seconds=2.0) as run:
        *blocking, fine = await run.run("hold_the_interpreter", "block_in_a_task 3600", FINE)
        assert [sample.failure_kind for (sample,) in blocking] == ["environment"] * 2
        assert rewards([fine]) == [1.0]
        for function in (b" in hold_the_interpreter\n", b" in block\n"):
            assert function in run.log(), "the log has its stack"


@pytest.mark.parametrize("deed", ["sleep 3600", "wait_whatever_happens"])
async def test_a_hanging_call_fails_alone_and_its_worker_is_replaced_when_it_is_idle(deed, ground, tmp_path):
    async with workers(ground, tmp_path, environment_timeout_seconds=2.0) as run:
        groups = await run.run(deed, *["wait 1"] * 5)
        assert "did not end within 2 seconds" in (groups[0][0].failure_message or "")
        assert rewards(groups[1:]) == [1.0] * 5
        await eventually(lambda: run.num_replaced == 1)
        assert rewards(await run.run(FINE)) == [1.0]


async def test_a_copy_forked_by_a_coroutine_ends_with_its_first_wait(ground, tmp_path):
    async with workers(ground, tmp_path) as run:
        groups = await run.run("fork_and_wait", *[FINE] * 5)
        assert rewards(groups) == [1.0] * 6
        pids = {sample.reward.sample_metrics["pid"] for group in groups for sample in group if sample.reward}
        assert len(pids) == 1 and run.num_replaced == 0


async def test_output_of_user_code_goes_to_the_log_which_is_rotated(ground, tmp_path):
    async with workers(ground, tmp_path) as run:
        assert rewards(await run.run("print", FINE)) == [1.0, 1.0]
        assert b"no newline" in run.log() and b"from a child" in run.log()
        assert rewards(await run.run("print_without_end 100")) == [1.0]
        log = tmp_path / "logs" / "rollout-0.log"
        # What is printed after the last rotation stays, up to the bound.
        await eventually(lambda: log.stat().st_size <= rollout_group.MAX_LOG_BYTES)
        assert log.with_name("rollout-0.log.1").stat().st_size <= rollout_group.MAX_LOG_BYTES


async def test_user_code_that_allocates_without_limit_fails_alone(ground, tmp_path):
    async with workers(ground, tmp_path) as run:
        (first,) = (await run.run(FINE))[0]
        worker = psutil.Process(int(first.reward.sample_metrics["pid"]))
        limit, _ = worker.rlimit(psutil.RLIMIT_DATA)
        used = worker.memory_info().data
        assert used < limit <= used + memory_allowance()
        worker.rlimit(psutil.RLIMIT_DATA, (used + 2**29, -1))  # a quarter of the machine takes long to fill
        groups = await run.run("gorge", *[FINE] * 5)
        assert "MemoryError" in (groups[0][0].failure_message or "")
        assert rewards(groups[1:]) == [1.0] * 5 and run.num_replaced == 0


async def test_a_template_shows_the_same_time_in_all_workers_of_a_run(ground, tmp_path):
    template = "{{ strftime_now('%H:%M:%S.%f') }} {{ messages[0].content }}"
    async with workers(ground, tmp_path, rollout_num_workers=2, chat_template=template) as run:

        async def texts() -> set[str]:
            return {each.text for each in await asyncio.gather(*(run.pool.prepare("hostile", 0) for _ in range(4)))}

        first = await texts()
        await run.group.handles[0].kill()
        await eventually(lambda: run.num_replaced == 1 and run.pool.workers[0].is_open)
        assert len(first | await texts()) == 1


async def test_workers_that_end_too_often_end_the_run(ground, tmp_path):
    async with workers(ground, tmp_path, rollout_max_restarts=1) as run:
        with pytest.raises(InfrastructureError, match="after 1 rollout workers already"):
            await run.run("end", FINE)


async def test_a_dataset_that_differs_between_processes_is_refused(ground, tmp_path):
    config = config_of(ground.folder, rollout_num_workers=2)
    group = RolloutGroup(config, [EnvironmentSpec("echo", {"random_order": True})], tmp_path, ground.cluster)
    with pytest.raises(UserError, match="different dataset in each process"):
        await group.start()
    await group.stop()


async def test_a_worker_that_still_loads_is_ended_at_once(ground, tmp_path):
    spec = EnvironmentSpec("reserved_by_each", {"notes": str(tmp_path / "notes"), "seconds": 3600})
    group = RolloutGroup(config_of(ground.folder), [spec], tmp_path, ground.cluster)
    starting = asyncio.ensure_future(group.start())
    await asyncio.sleep(0.5)
    starting.cancel()
    began = time.monotonic()
    await group.stop()
    assert time.monotonic() - began < group.stop_seconds / 2


async def test_a_process_that_left_its_worker_is_known_to_the_reaper(ground, tmp_path):
    async with workers(ground, tmp_path) as run:
        assert rewards(await run.run(f"double_fork {tmp_path}")) == [1.0]
        daemon = psutil.Process(int((tmp_path / "pid").read_text()))
        assert "TELESCOPE" in " ".join(daemon.environ())
        daemon.kill()


@pytest.mark.sandbox
async def test_sandboxes_end_with_their_worker_and_are_prepared_again(ground, tmp_path):
    async with workers(ground, tmp_path, "boxed") as run:
        running = asyncio.ensure_future(run.run(*["sleep 4.65831"] * 4))
        await eventually(lambda: num_processes("sleep 4.65831") >= 2)
        ledger = SandboxLedger(tmp_path)
        before = {row["id"] for row in ledger.rows()}
        groups = await asyncio.gather(running, run.run("end"), run.run("false", "true"))
        assert rewards(groups[0]) == [1.0] * 4 and rewards(groups[2]) == [0.0, 1.0]
        assert groups[1][0][0].failure_kind == "environment"
        assert run.num_replaced == 3
        alive = await get_provider().find(ledger.run)
        assert alive and not {handle.id for handle in alive} & before, "sandboxes of an ended worker are alive"
    assert await get_provider().find(ledger.run) == []
    await reap(tmp_path)
    rows = list(ledger.rows())
    assert {row["id"] for row in rows} == {row["id"] for row in rows if row.get("destroyed")}


@pytest.mark.sandbox
async def test_a_sandbox_that_is_lost_masks_its_sample(ground, tmp_path):
    async with workers(ground, tmp_path, "boxed") as run:
        groups = await run.run("lose", "true")
        (lost,), (fine,) = groups
        assert lost.reward is None and lost.failure_kind == "infrastructure"
        assert "has ended" in (lost.failure_message or "")
        assert fine.reward is not None and fine.reward.total_reward == 1.0


@pytest.mark.sandbox
async def test_what_a_worker_does_with_sandboxes_is_recorded(ground, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox_rows, "GAUGE_SECONDS", 0.0)
    calls = [
        {"name": "shell", "arguments": {"command": "echo hi"}},
        {"name": "once", "arguments": {"command": "echo ho"}},
        {"name": "pull", "arguments": {"image": "nowhere"}},
    ]
    with Recorder(tmp_path) as recorder:
        async with workers(ground, tmp_path, "sandboxed_tools", recorder.write, max_tokens=128) as run:
            # Each is the answer of both turns.
            deeds = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
            for (sample,) in await run.run(*deeds):
                assert sample.reward is not None, sample.failure_message
                recorder.write("tool_calls", sample.rows["tool_calls"])
    record = Run(tmp_path)
    spans = record.table("spans").to_pylist(maps_as_pydicts="strict")
    assert {span["component"] for span in spans} == {"sandbox"}
    assert {span["attributes"]["worker"] for span in spans} == {"0"} and all(s["end"] >= s["start"] for s in spans)
    by_call = [
        {(span["name"], span["attributes"].get("error")) for span in spans if span["sample_id"] == sample}
        for sample in ("0-0", "1-0", "2-0")
    ]
    assert by_call == [
        {("queue", None), ("exec", None)},
        {("create", None), ("exec", None), ("destroy", None)},
        {("create", "SandboxImagePullError")},
    ]
    created, destroyed = (
        {span["attributes"]["sandbox"] for span in spans if span["name"] == name and "error" not in span["attributes"]}
        for name in ("create", "destroy")
    )
    # One of the pool's two was used and is replaced, unless the run ends before; two calls had one of their own.
    assert len(created) >= 4 and created <= destroyed
    (used,) = {span["attributes"]["sandbox"] for span in spans if span["sample_id"] == "0-0"}
    tools = {row["name"]: row for row in record.table("tool_calls").to_pylist()}
    assert {name: tools[name]["sandbox"] for name in tools} == {"shell": used, "once": None, "pull": None}
    assert "hi" in tools["shell"]["result"] and "ho" in tools["once"]["result"]

    last: dict[Any, float] = {}
    most_alive = 0.0
    for row in sorted(record.table("gauges").to_pylist(maps_as_pydicts="strict"), key=lambda row: row["time"]):
        labels = row["labels"]
        last[row["name"], labels["provider"], labels.get("operation"), labels.get("error")] = row["value"]
        most_alive = max(most_alive, row["value"] if row["name"] == "sandboxes_alive" else 0.0)
    assert most_alive >= 1.0  # of the two in the pool: a report may come before the second is there
    assert last == {
        ("sandboxes_alive", "local", None, None): 0.0, ("sandboxes_alive", "unobtainable", None, None): 0.0,
        ("sandbox_creates_total", "local", None, None): len(created),
        ("sandbox_execs_total", "local", None, None): 4.0, ("sandbox_creates_total", "unobtainable", None, None): 0.0,
        ("sandbox_execs_total", "unobtainable", None, None): 0.0,
        ("sandbox_failures_total", "unobtainable", "create", "SandboxImagePullError"): 2.0,
    }  # fmt: skip
    assert undocumented(name for name, *_ in last) == []
