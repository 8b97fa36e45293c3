"""Placement of a run's workers on two Ray nodes, and their environment."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import psutil
import pytest
import ray
from ray import cloudpickle
from ray._raylet import AuthenticationTokenLoader
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tests.integration.cluster.conftest import HEAD, OTHER, TwoNodes, config_of
from tests.integration.cluster.test_rollout_workers import FINE, Ground, rewards, workers
from tests.integration.environments.conftest import save_byte_tokenizer
from tests.processes import eventually
from tests.unit.sandbox.conftest import docker  # noqa: F401 (a fixture)
from transformers import AutoTokenizer

from telescope.cli.main import main
from telescope.cluster.actors import HostGroup, make_actor
from telescope.cluster.placement import Placement, network_of, reserve
from telescope.cluster.ray_cluster import admits, disconnect, settle_authentication
from telescope.cluster.trainer_group import TrainerGroup
from telescope.config import TelescopeConfig
from telescope.config.plan import PlacementError, plan_placement
from telescope.errors import DeadlineExceeded, RankLost, UserError
from telescope.orchestrator.collectors import collect, sources_of
from telescope.orchestrator.run_directory import RunDirectory
from telescope.record.gauges import ReadingBatch
from telescope.record.reader import Run
from telescope.record.system_metrics import MachineSampler
from telescope.sandbox import GenericSandboxPool, SandboxConfig, get_provider
from telescope.sandbox.ledger import DIRECTORY_VARIABLE, SandboxLedger

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have the tests on their path

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[1] / "trainer" / "golden" / "model"
ROLES = ("inference", "trainer")


class Witness:
    """Replaces an inference server or a trainer rank, and reports what it sees."""

    def look(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        return {
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(), "namespace": context.namespace, "executable": sys.executable,
            "environment": dict(os.environ),
        }  # fmt: skip

    def say(self, words: str) -> None:
        print(words, flush=True)


@asynccontextmanager
async def place(config: TelescopeConfig, two_nodes: TwoNodes) -> AsyncIterator[Placement]:
    """The reserved places; afterwards all that the cluster has is free again."""
    placement = await reserve(config, plan_placement(config, two_nodes.cluster.resources))
    try:
        yield placement
    finally:
        placement.remove()
        await all_is_free(two_nodes)


async def all_is_free(two_nodes: TwoNodes) -> None:
    """Ray takes bundles back in its own time."""
    deadline = time.monotonic() + 30
    while (free := ray.available_resources().get("GPU")) != two_nodes.cluster.resources.gpus:
        assert time.monotonic() < deadline, f"only {free} GPUs are free"
        await asyncio.sleep(0.02)


def look_around(config: TelescopeConfig, placement: Placement) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the servers and the ranks see that are started in these places as the groups start theirs."""
    cpus = config.ray_inference_cpus_per_worker * config.inference_tensor_parallel_size
    servers = [
        make_actor(Witness, placement.options("inference", index, cpus)).remote()
        for index in range(config.num_inference_servers)
    ]
    ranks = [
        make_actor(Witness, placement.options("trainer", rank, config.ray_trainer_cpus_per_worker)).remote()
        for rank in range(config.trainer_num_workers)
    ]
    seen = ray.get([actor.look.remote() for actor in (*servers, *ranks)], timeout=120)
    return seen[: len(servers)], seen[len(servers) :]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("strategy", "workers", "on_each_node"), [
    ("PACK", 4, [4]), ("STRICT_PACK", 4, [4]), ("SPREAD", 2, [1, 1]), ("STRICT_SPREAD", 2, [1, 1]),
])  # fmt: skip
async def test_each_strategy_places_the_workers_accordingly(two_nodes, role, strategy, workers, on_each_node):
    (opposite,) = {*ROLES} - {role}
    config = config_of(
        **{f"{role}_num_workers": workers, f"ray_{role}_placement_strategy": strategy, f"{opposite}_num_workers": 2}
    )
    async with place(config, two_nodes) as placement:
        nodes = {"inference": placement.server_nodes, "trainer": placement.rank_nodes}[role]
        assert sorted(Counter(nodes).values()) == on_each_node


async def test_workers_that_need_one_node_are_reserved_first(two_nodes):
    """Four that are spread would leave no node whole for four that must be together."""
    for role in ROLES:
        (opposite,) = {*ROLES} - {role}
        config = config_of(
            ray_placement_timeout_s=60,
            **{
                f"{role}_num_workers": 4, f"ray_{role}_placement_strategy": "STRICT_PACK",
                f"{opposite}_num_workers": 4, f"ray_{opposite}_placement_strategy": "SPREAD",
            },
        )  # fmt: skip
        async with place(config, two_nodes) as placement:
            together = {"inference": placement.server_nodes, "trainer": placement.rank_nodes}[role]
            assert len(set(together)) == 1


async def test_workers_see_distinct_gpus_and_a_tensor_parallel_server_is_on_one_node(two_nodes):
    config = config_of(
        inference_num_workers=4, inference_tensor_parallel_size=2, trainer_num_workers=2,
        ray_inference_placement_strategy="SPREAD", ray_trainer_placement_strategy="SPREAD",
    )  # fmt: skip
    async with place(config, two_nodes) as placement:
        servers, ranks = look_around(config, placement)
    assert [len(server["gpus"]) for server in servers] == [2, 2]
    assert [len(rank["gpus"]) for rank in ranks] == [1, 1]
    seen = [(worker["node"], gpu) for worker in (*servers, *ranks) for gpu in worker["gpus"]]
    assert len(seen) == len(set(seen)) == 6
    assert [server["node"] for server in servers] == placement.server_nodes
    assert [rank["node"] for rank in ranks] == placement.rank_nodes
    assert {worker["address"] for worker in servers} == {worker["address"] for worker in ranks} == {HEAD, OTHER}
    network = network_of(config, placement, two_nodes.cluster.driver_node)
    assert not network.servers_on_loopback
    assert not network.broadcast_on_loopback


async def test_with_share_gpus_each_rank_sees_the_gpu_of_one_server(two_nodes):
    config = config_of(
        inference_num_workers=2, trainer_num_workers=2, share_gpus=True, ray_inference_placement_strategy="PACK"
    )
    async with place(config, two_nodes) as placement:
        servers, ranks = look_around(config, placement)
    pairs = [(server["node"], *server["gpus"]) for server in servers]
    assert pairs == [(rank["node"], *rank["gpus"]) for rank in ranks]
    assert len(set(pairs)) == 2
    assert {len(pair) for pair in pairs} == {2}, "a node and a single GPU"


@pytest.mark.parametrize(("fields", "words"), [
    (
        {"ray_trainer_placement_strategy": "STRICT_SPREAD", "trainer_num_workers": 3},
        ["3 trainer bundles", 'ray_trainer_placement_strategy "STRICT_SPREAD"', "2 nodes", 'to "SPREAD"'],
    ),
    (
        {"ray_inference_placement_strategy": "STRICT_PACK", "inference_num_workers": 5},
        ['ray_inference_placement_strategy "STRICT_PACK"', "2 nodes of 4 cores and 4 GPUs", 'to "PACK"'],
    ),
    ({"inference_num_workers": 8}, ["inference_num_workers is 8", "needs 10 GPUs", "cluster has 8", "to 6"]),
    ({"ray_trainer_cpus_per_worker": 4.5}, ["ray_trainer_cpus_per_worker", "needs 9.2 CPU cores", "has 8"]),
    (
        {"inference_num_workers": 6, "inference_tensor_parallel_size": 6},
        ["each of 6 GPUs", "2 nodes of 4 cores and 4 GPUs", "lower inference_tensor_parallel_size, which is 6"],
    ),
])  # fmt: skip
async def test_a_placement_that_can_never_fit_is_refused_before_ray_is_called(two_nodes, fields, words):
    with pytest.raises(PlacementError) as refused:
        async with place(config_of(**fields), two_nodes):
            pass
    assert [word for word in words if word not in str(refused.value)] == []


async def test_gpus_of_another_run_are_waited_for_until_the_deadline_and_nothing_stays_reserved(two_nodes):
    second = config_of(inference_num_workers=2, trainer_num_workers=2, ray_placement_timeout_s=1)
    async with place(config_of(inference_num_workers=3, trainer_num_workers=3), two_nodes):
        with pytest.raises(DeadlineExceeded, match=r"trainer workers.* ray_placement_timeout_s = 1 s.* 0 GPUs"):
            async with place(second, two_nodes):
                pass


def test_a_cluster_that_asks_for_its_token_is_joined_by_its_address(two_nodes):
    """Ray alone does not refuse it. The error names a wrong or missing token."""
    address = two_nodes.raylets.address
    assert not two_nodes.cluster.started_here
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert (admits(address), admits(address, "another"), admits("127.0.0.4:1")) == (False, False, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE")
        patch.setenv("RAY_AUTH_TOKEN", "another")
        with pytest.raises(UserError, match=r"the cluster at .* asks for a token, and rejects the one.*RAY_AUTH_TOKEN"):
            settle_authentication(address)
    AuthenticationTokenLoader.instance().reset_cache()
    assert {(node.name, node.gpus) for node in two_nodes.cluster.resources.nodes} == {(HEAD, 4), (OTHER, 4)}


def test_workers_have_the_runs_interpreter_directory_variables_and_namespace(two_nodes, capfd):
    actor = make_actor(Witness, {"num_cpus": 0.1}).remote()
    seen = ray.get(actor.look.remote(), timeout=120)
    variables = seen["environment"]
    assert seen["namespace"] == "of-the-test"
    assert seen["executable"] == sys.executable
    assert variables["VIRTUAL_ENV"] == sys.prefix
    assert variables["PATH"].startswith(f"{sys.prefix}/bin:")
    assert variables["TELESCOPE_RUN_DIR"] == str(two_nodes.run_dir)
    assert variables["NCCL_DEBUG"] == "WARN"
    assert variables["NCCL_DEBUG_FILE"] == "/from/the/field", "the field wins over the driver's environment"
    assert variables["NCCL_IB_HCA"] == "set by the user", "though the nodes were started without it"
    ray.get(actor.say.remote("words of a worker"), timeout=60)
    wait_for_words(capfd, "words of a worker")
    ray.kill(actor)


def wait_for_words(capfd: pytest.CaptureFixture[str], words: str) -> None:
    """Ray carries what workers print to the driver (`ray_log_to_driver`), in its own time."""
    deadline, printed = time.monotonic() + 30, ""
    while words not in printed:
        assert time.monotonic() < deadline, f"{words!r} did not reach the driver, only: {printed}"
        time.sleep(0.1)
        captured = capfd.readouterr()
        printed += captured.out + captured.err


async def test_ranks_of_two_nodes_connect_at_their_nodes_addresses_and_report_their_nodes(two_nodes):
    """Real ranks, on CPUs: the store, gloo, and the listener for an engine of each rank."""
    config = config_of(
        device="cpu", model=str(MODEL), trainer_num_workers=2, inference_num_workers=2, trainer_threads=1,
        ray_trainer_placement_strategy="STRICT_SPREAD", ray_inference_placement_strategy="STRICT_SPREAD",
        ray_broadcast_init_timeout_s=77,
    )  # fmt: skip
    async with place(config, two_nodes) as placement:
        network = network_of(config, placement, two_nodes.cluster.driver_node)
        assert not network.broadcast_on_loopback
        group = TrainerGroup(config, placement, two_nodes.run_dir, two_nodes.cluster)
        infos = await group.setup()
        assert [info.config_hash for info in infos] == [config.hash, config.hash]
        address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        listeners = [await group.listen_for_engine(engine, 1) for engine in range(2)]
        assert [listener.host for listener in listeners] == [address_of[node] for node in placement.rank_nodes]
        assert {listener.timeout_seconds for listener in listeners} == {77}
        names = [(await group.take_readings(rank)).node for rank in range(2)]
        assert names == [two_nodes.cluster.node_names[node] for node in placement.rank_nodes]
        assert len(set(names)) == 2
        await group.stop()


async def test_gauges_of_every_node_are_recorded_and_a_node_that_goes_away_is_a_warning(two_nodes, tmp_path):
    """The second node is gone afterwards."""
    here, there = (f"{socket.gethostname()} ({address})" for address in (HEAD, OTHER))
    config = config_of(
        run_dir=str(tmp_path), use_wandb=False, system_metrics_collection_interval_seconds=0.2,
        metrics_logger_interval_seconds=0.2,
    )  # fmt: skip
    directory = RunDirectory.create(config, [])
    hosts, machine = HostGroup(config, two_nodes.cluster), MachineSampler(0.2)
    with directory.open_record(console=False):
        sources = sources_of(config, machine, NoTrainer(), NoServers(), hosts)  # type: ignore[arg-type]
        collecting = asyncio.create_task(collect(sources, directory.recorder))
        await rows_until(tmp_path, "gauges", lambda rows: {here, there} <= {row["node"] for row in rows})
        await asyncio.to_thread(two_nodes.lose_the_other)
        warning = f"machine {there}: no readings"
        await rows_until(tmp_path, "logs", lambda rows: any(row["message"].startswith(warning) for row in rows))
        lost_at = time.time()
        await rows_until(tmp_path, "gauges", lambda rows: max(row["time"] for row in rows) > lost_at)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        await hosts.stop()
        machine.stop()
    gauges = Run(tmp_path).table("gauges").to_pylist()
    assert {row["node"] for row in gauges} == {here, there}
    assert {row["node"] for row in gauges if row["time"] > lost_at} == {here}
    memory = {row["node"]: row["value"] for row in gauges if row["name"] == "memory_total_bytes"}
    assert memory[here] == memory[there] > 0, "they are one machine, after all"


async def test_ranks_restart_on_the_nodes_that_are_left_when_one_is_lost(two_nodes):
    """Real ranks, on CPUs. The node that is lost was added for this test."""
    raylets = two_nodes.raylets
    added = raylets.add_node(num_cpus=4, num_gpus=4, object_store_memory=80 << 20, node_ip_address="127.0.0.4")
    config = config_of(
        device="cpu", model=str(MODEL), trainer_num_workers=2, trainer_threads=1,
        ray_trainer_placement_strategy="SPREAD", ray_placement_timeout_s=60,
    )  # fmt: skip
    placement = await reserve(config, plan_placement(config, two_nodes.cluster.resources))
    try:
        group = TrainerGroup(config, placement, two_nodes.run_dir, two_nodes.cluster)
        await group.setup()
        here = two_nodes.cluster.driver_node
        (lost,) = [rank for rank, node in enumerate(placement.rank_nodes) if node != here]
        await asyncio.to_thread(raylets.remove_node, added, allow_graceful=False)

        async def ask() -> None:
            while True:  # the rank exits a moment after its node
                await group.weight_metadata()

        with pytest.raises(RankLost, match=f"trainer rank {lost} on "):
            await asyncio.wait_for(ask(), 60)
        async with group.queue:
            await group.replace()
            assert placement.rank_nodes == [here, here]
            await group.setup()
            assert await group.weight_metadata()
        await group.stop()
    finally:
        placement.remove()


async def test_rollout_workers_are_on_both_nodes_and_go_on_with_one(two_nodes, tmp_path):
    raylets = two_nodes.raylets
    added = raylets.add_node(num_cpus=4, object_store_memory=80 << 20, node_ip_address="127.0.0.5")
    save_byte_tokenizer(tmp_path / "tokenizer")
    here, there = two_nodes.cluster.driver_node, added.node_id
    cluster = replace(two_nodes.cluster, node_names={there: "there", here: "here"})
    ground = Ground(cluster, tmp_path, AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    async with workers(ground, tmp_path, rollout_num_workers=4) as run:
        assert [handle.node for handle in run.group.handles] == [here, there, here, there]
        run.group.infos[0] = replace(run.group.infos[0], shares_resources=True)
        assert run.group.homes("hostile") == [0, 1], "one on each node"
        running = asyncio.ensure_future(run.run(*["wait 5"] * 20))
        assert rewards(await run.run(*[FINE] * 20)) == [1.0] * 20
        await asyncio.to_thread(raylets.remove_node, added, allow_graceful=False)
        assert rewards(await running) == [1.0] * 20
        await eventually(lambda: [handle.node for handle in run.group.handles] == [here] * 4)
        assert run.group.homes("hostile") == [0]


class Keeper:
    """Keeps sandboxes in use, as a rollout worker does."""

    async def keep(self, providers: tuple[str, ...]) -> None:
        config = SandboxConfig(memory_mb=256, disk_size_gb=0.05)
        self.pools = [GenericSandboxPool(get_provider(name), config, pool_size=3) for name in providers]
        for pool in self.pools:
            await pool.start()
            for _ in range(3):
                await pool.acquire(timeout=60)


@pytest.mark.sandbox
async def test_reap_finds_the_sandboxes_of_a_lost_node_without_its_file(
    two_nodes: TwoNodes,
    tmp_path: Path,
    docker: Path,  # noqa: F811
) -> None:
    """Containers outlive the node, as sandboxes in the cloud do; local ones end with it."""
    ledger, providers = SandboxLedger(tmp_path / "run"), ("docker", "local")
    (tmp_path / "run" / "tables").mkdir(parents=True)
    added = two_nodes.raylets.add_node(num_cpus=1, object_store_memory=80 << 20, node_ip_address="127.0.0.6")
    variables = {DIRECTORY_VARIABLE: str(tmp_path / "run"), "DOCKER_FAKE": str(docker), "PATH": os.environ["PATH"]}
    there = NodeAffinitySchedulingStrategy(added.node_id, soft=False)
    options = {"num_cpus": 0.1, "scheduling_strategy": there, "runtime_env": {"env_vars": variables}}
    keeper = make_actor(Keeper, options).remote()
    await asyncio.wait_for(keeper.keep.remote(providers), 120)
    before = [await get_provider(name).find(ledger.run) for name in providers]
    assert [len(handles) for handles in before] == [3, 3]
    assert {row["id"] for row in ledger.rows()} == {handle.id for handles in before for handle in handles}
    await asyncio.to_thread(two_nodes.raylets.remove_node, added, allow_graceful=False)
    ledger.path.unlink()
    assert await asyncio.to_thread(main, ["sandbox", "reap", str(tmp_path / "run"), "--provider", "docker"]) == 0
    assert await get_provider("docker").find(ledger.run) == []
    async with asyncio.timeout(30):
        while await get_provider("local").find(ledger.run):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def test_ray_shutdown_on_exit_stops_the_joined_cluster_and_nothing_else(two_nodes, monkeypatch):
    """Last in this file: nothing is left afterwards, not even of what is deaf to SIGTERM. Nothing is killed that would
    have ended by itself."""
    killed: list[int] = []

    def kill(process: psutil.Process) -> None:
        killed.append(process.pid)
        process.send_signal(SIGKILL)

    monkeypatch.setattr(psutil.Process, "kill", kill)
    session = two_nodes.raylets.head_node.session_name

    def daemons() -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if any(session in argument for argument in process.info["cmdline"] or [])
        ]

    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    with (
        subprocess.Popen([sys.executable, "-c", "input()", "session_of_another"], stdin=subprocess.PIPE) as another,
        subprocess.Popen([sys.executable, "-c", deaf, session], stdout=subprocess.PIPE) as stubborn,
        ExitStack() as at_last,
    ):
        at_last.callback(stubborn.kill)
        stubborn.stdout.readline()
        assert len(daemons()) >= 3, "the raylet and the GCS at least, and the stubborn one"
        disconnect(two_nodes.cluster, config_of(ray_shutdown_on_exit=True))
        assert daemons() == []
        assert killed == [stubborn.pid]
        assert not ray.is_initialized()
        assert another.poll() is None
        another.communicate(b"\n")


class NoTrainer:
    """A trainer without ranks."""

    world_size = 0


class NoServers:
    """Servers that have nothing to say."""

    async def take_readings(self, index: int) -> ReadingBatch:
        return ReadingBatch([], [])


async def rows_until(
    run_dir: Path, table: str, enough: Callable[[list[dict[str, Any]]], bool], seconds: float = 90.0
) -> None:
    """Waits until rows of a table of the live record meet a condition."""
    deadline, rows = time.monotonic() + seconds, list[dict[str, Any]]()
    while not (rows and enough(rows)):
        assert time.monotonic() < deadline, f"{table} after {seconds:g} s: {rows[-5:]}"
        await asyncio.sleep(0.2)
        rows = await asyncio.to_thread(lambda: Run(run_dir).table(table).to_pylist())
