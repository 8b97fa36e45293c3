"""Commands to the ranks of the trainer, their exits, and the folder that takes the trained model."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from ray.exceptions import OutOfMemoryError, RayActorError

from telescope.cluster import actors, trainer_group
from telescope.cluster.placement import Placement
from telescope.cluster.ray_cluster import Cluster
from telescope.cluster.trainer_group import TrainerGroup, describe_rank_exit
from telescope.config import TelescopeConfig
from telescope.errors import DeadlineExceeded, RankLost, RunError
from telescope.record.gauges import ReadingBatch
from telescope.trainer.batch import Layout, StepInput, StepResult

CONFIG = TelescopeConfig.model_validate({"model": "m", "environments": [{"name": "countdown"}]})


class Rank:
    """The actor of a rank, which answers `warm_up` when `compiled` is set, and notes what it is asked."""

    def __init__(self, compiled: asyncio.Event) -> None:
        self.calls: list[str] = []
        self.fails_at = ""
        self.error: Exception = ArithmeticError("the gradient is not finite")
        self.is_asked = asyncio.Event()
        self._compiled = compiled

        self.concurrency_groups: dict[str, str | None] = {}
        self.call = SimpleNamespace(options=self._options)
        self.stop = SimpleNamespace(remote=lambda: self._answer("stop"))

    def _options(self, concurrency_group: str | None) -> Any:
        def remote(command: str, *args: Any) -> Any:
            self.concurrency_groups[command] = concurrency_group
            return self._called(command, *args)

        return SimpleNamespace(remote=remote)

    def _called(self, command: str, *args: Any) -> Any:
        return self._answer(command.rpartition(".")[2])

    async def _answer(self, name: str) -> Any:
        self.calls.append(name)
        self.is_asked.set()
        if name == self.fails_at:
            raise self.error
        if name == "warm_up":
            await self._compiled.wait()
        answers = {"train_step": StepResult({"loss": 0.5}, []), "take_readings": ReadingBatch([], [])}
        return answers.get(name, name)


@pytest.fixture
def compiled() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
def rank(compiled: asyncio.Event) -> Rank:
    return Rank(compiled)


def group_of(monkeypatch: pytest.MonkeyPatch, ranks: list[Any], folder: Path = Path()) -> TrainerGroup:
    made = iter(ranks)
    monkeypatch.setattr(trainer_group, "make_actor", lambda *_: SimpleNamespace(remote=lambda *_: next(made)))
    placement = SimpleNamespace(rank_nodes=[0] * len(ranks), options=lambda *_: {})
    cluster = SimpleNamespace(node_names={0: "here"})
    config = CONFIG.replace(trainer_num_workers=len(ranks))
    return TrainerGroup(config, cast(Placement, placement), folder, cast(Cluster, cluster))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, rank: Rank) -> TrainerGroup:
    made = group_of(monkeypatch, [rank])
    monkeypatch.setattr(trainer_group, "make_actor", lambda *_: SimpleNamespace(remote=lambda *_: rank))
    return made


async def test_a_group_that_has_compiled_is_stopped_by_its_ranks(group, rank, compiled):
    compiled.set()
    assert await group.warm_up() == ["warm_up"]
    await group.stop()
    assert rank.calls == ["warm_up", "stop"]


async def test_gauges_and_the_abort_of_a_sync_do_not_wait_for_what_a_rank_computes(group, rank, compiled):
    compiled.set()
    await group.warm_up()
    await group.take_readings(0)
    await group.abort_engine(0, "the engine is down")
    groups = rank.concurrency_groups
    assert groups["trainer.warm_up"] is None  # Ray's own group, one call at a time
    assert len({groups["trainer.warm_up"], groups["take_readings"], groups["sender.abort"]}) == 3
    assert {groups["take_readings"], groups["sender.abort"]} <= set(actors.ACTOR_OPTIONS["concurrency_groups"])


async def test_ranks_that_are_compiling_are_not_waited_for_at_a_stop(group, rank):
    warming_up = asyncio.create_task(group.warm_up())
    await rank.is_asked.wait()
    warming_up.cancel()
    await asyncio.gather(warming_up, return_exceptions=True)
    await group.stop()
    assert rank.calls == ["warm_up"]


async def test_compiling_has_a_named_deadline(group, monkeypatch):
    monkeypatch.setattr(trainer_group, "SETUP_TIMEOUT_SECONDS", 0.01)
    with pytest.raises(DeadlineExceeded, match="compiling the model's blocks"):
        await group.warm_up()


async def test_the_version_counts_steps_that_all_ranks_have_finished_and_starts_over_at_a_restart(group, rank):
    inputs = [StepInput(step=0, version=0, minibatches=[])]
    identities = [group.weights_identity]
    for steps in (1, 2):
        await group.train_step(inputs)
        assert group.version == steps
        identities.append(group.weights_identity)
    rank.fails_at = "train_step"
    with pytest.raises(ArithmeticError):
        await group.train_step(inputs)
    assert group.version == 2
    assert not group.is_settled, "some ranks may have taken the step"
    await group.restart()
    assert group.version == 0
    assert group.is_settled
    assert len({*identities, group.weights_identity}) == 4


class SharingRank(Rank):
    """A rank that shares its rows with a neighbor. The last one sends no weights."""

    def __init__(self, rank: int) -> None:
        super().__init__(asyncio.Event())
        self.layout = replace(Layout.of_neighbors(rank, 4, 2), sends_weights=rank < 3)
        self.given: list[Any] = []

    async def _called(self, command: str, *args: Any) -> Any:
        if command == "setup":
            return SimpleNamespace(device="cpu", layout=self.layout)
        self.given.append(args[0])
        return StepResult({}, []) if command == "trainer.train_step" else ("127.0.0.1", 1)


async def test_ranks_that_share_rows_get_the_same_input_and_engines_the_ranks_that_send(monkeypatch, tmp_path):
    ranks = [SharingRank(rank) for rank in range(4)]
    group = group_of(monkeypatch, ranks, tmp_path)
    monkeypatch.setattr(trainer_group, "ray", SimpleNamespace(put=lambda share: share))
    await group.setup()
    assert group.data_size == 2
    for rank in ranks:
        rank.given.clear()
    first, second = (StepInput(step=0, version=0, minibatches=[]) for _ in range(2))
    await group.train_step([first, second])
    assert [rank.given.pop() for rank in ranks] == [first, first, second, second]
    for engine in range(4):
        await group.connect_engine(engine)
    assert [rank.given for rank in ranks] == [[0, 3], [1], [2], []]


class ExitedRank(Rank):
    """A rank whose process exits during a command. The collectives of other ranks fail before Ray reports that."""

    async def _answer(self, name: str) -> str:
        await asyncio.sleep(0.05)
        raise RayActorError()


class FailingRank(Rank):
    async def _answer(self, name: str) -> str:
        raise ValueError("connection closed by peer")


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch, compiled: asyncio.Event, tmp_path: Path) -> TrainerGroup:
    monkeypatch.setattr(actors, "DAEMON_EXIT_SECONDS", 0.0)
    log = tmp_path / "logs" / "trainer-1.log"
    log.parent.mkdir()
    log.write_text("from an earlier attempt\n")
    group = group_of(monkeypatch, [FailingRank(compiled), ExitedRank(compiled)], tmp_path)
    with log.open("a") as file:
        file.write("loading the model\n")
    return group


async def test_a_killed_rank_is_named_with_the_signal_and_the_end_of_its_log(two_ranks, tmp_path):
    with pytest.raises(RunError) as raised:
        await two_ranks.weight_metadata()
    assert str(raised.value) == (
        "trainer rank 1 on here was killed by SIGKILL (often sent by the kernel when memory runs out) during: weight "
        f"metadata. Its log ({tmp_path / 'logs' / 'trainer-1.log'}) ends:\nloading the model"
    )


class LivingRank(Rank):
    async def _answer(self, name: str) -> str:
        return name


@pytest.fixture
def replaceable(two_ranks: TrainerGroup, compiled: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Lets `two_ranks` be replaced by ranks that answer. Returns the ranks that Ray is asked to kill."""
    ranks = iter([LivingRank(compiled), LivingRank(compiled)])
    killed: list[Any] = []
    monkeypatch.setattr(trainer_group, "make_actor", lambda *_: SimpleNamespace(remote=lambda *_: next(ranks)))
    monkeypatch.setattr(trainer_group, "ray", SimpleNamespace(kill=killed.append))

    two_ranks._placement.find_ranks = lambda: None
    return killed


async def test_a_lost_rank_is_reported_by_the_watch_until_the_ranks_are_replaced(two_ranks, replaceable):
    watch = asyncio.create_task(two_ranks.watch())
    late = asyncio.create_task(two_ranks._one(1, "reading its gauges", "take_readings"))
    before = two_ranks.weights_identity
    with pytest.raises(RankLost, match="rank 1"):
        await two_ranks.weight_metadata()
    with pytest.raises(RankLost, match="rank 1"):
        await watch
    await two_ranks.replace()
    assert len(replaceable) == 2
    assert (two_ranks.num_replacements, two_ranks.version) == (1, 0)
    assert two_ranks.weights_identity != before
    with pytest.raises(RankLost):
        await late
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(two_ranks.watch(), 0.05)
    assert await two_ranks.weight_metadata() == "weight_metadata"


@pytest.fixture
def namesake() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine, whose id a rank on another machine may have too."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


async def test_a_local_process_with_the_id_of_a_remote_rank_is_never_signalled(group, rank, namesake, monkeypatch):
    info = SimpleNamespace(device="cpu", layout=Layout(0, 1), pid=namesake.pid)
    monkeypatch.setattr(rank, "_answer", lambda name: asyncio.sleep(0, info if name == "setup" else ("10.0.0.9", 1)))
    killed: list[Any] = []
    monkeypatch.setattr(trainer_group, "ray", SimpleNamespace(kill=killed.append))
    group._placement.find_ranks = lambda: None
    assert await group.setup() == [info]
    await group.replace()
    await group.setup()
    await group.stop()
    assert killed == [rank]
    with pytest.raises(subprocess.TimeoutExpired):
        namesake.wait(0.1)


async def test_an_idle_rank_that_is_lost_is_noticed_by_its_gauges(two_ranks):
    with pytest.raises(RankLost, match="during: reading its gauges"):
        await two_ranks.take_readings(1)
    with pytest.raises(RankLost):
        await two_ranks.watch()
    report = two_ranks._exit_report(1, "training step 3", "The actor died because its node has died. Node Id: 5e")
    assert report.startswith("trainer rank 1 on here was lost with its node during: training step 3")


async def test_a_collective_that_fails_waits_until_the_loss_of_a_node_is_known(two_ranks, monkeypatch):
    monkeypatch.setattr(trainer_group, "RANK_EXIT_SECONDS", 0.0)
    with pytest.raises(RankLost, match="rank 1"):
        await two_ranks.weight_metadata()


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.distributed.DistBackendError("NCCL error in: NCCLUtils.cpp:93\nCuda failure 'out of memory'"),
    torch.distributed.DistBackendError("NCCL error\nLast error:\nFailed to CUDA calloc async 4 bytes"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
], ids=["allocator", "nccl", "buffer of nccl", "kernel", "cublas"])  # fmt: skip
async def test_a_rank_that_runs_out_of_gpu_memory_names_the_fields_to_change(group, rank, error):
    rank.fails_at, rank.error = "warm_up", error
    message = r"rank 0 ran out of GPU memory during: compiling .*\. Lower seq_len or entropy_chunk_size, set .*"
    with pytest.raises(RunError, match=message + re.escape(str(error))):
        await group.warm_up()


async def test_a_host_that_runs_out_of_memory_is_not_advised_on_the_gpu(group, rank):
    rank.fails_at = "warm_up"
    rank.error = OutOfMemoryError("Task was killed due to the node running low on memory.")
    with pytest.raises(OutOfMemoryError):
        await group.warm_up()


async def test_an_exception_in_a_rank_is_not_a_lost_rank(group, rank):
    rank.fails_at = "weight_metadata"
    with pytest.raises(ArithmeticError):
        await group.weight_metadata()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(group.watch(), 0.05)


CRASHES = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from telescope.cluster.actors import TrainerActor
from telescope.config import TelescopeConfig

config = TelescopeConfig.model_validate({"model": "m", "environments": [{"name": "countdown"}]})
for name in sys.argv[2:]:
    pid = os.fork()
    if pid == 0:
        actor = TrainerActor(config.to_json(), 0, 1, f"{sys.argv[1]}/{name}")
        os.kill(os.getpid(), getattr(signal, name))
    assert os.waitpid(pid, 0)[1] != 0
"""


def test_the_log_of_a_rank_names_the_signal_that_ended_it(tmp_path: Path) -> None:
    names = ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGKILL"]
    subprocess.run([sys.executable, "-c", CRASHES, str(tmp_path), *names], check=True, timeout=60)
    for name in names:
        log = (tmp_path / name / "logs" / "trainer-0.log").read_text()
        assert describe_rank_exit(log).startswith(f"was killed by {name}")
