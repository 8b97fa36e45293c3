"""What the actors make of their places before they start their parts: the plain classes, without Ray's processes."""

import asyncio
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from ray.exceptions import ObjectLostError, RayTaskError

from telescope.cluster import actors, inference_group, placement
from telescope.cluster.actors import ActorExited, InferenceActor, TrainerActor, answer
from telescope.cluster.ray_cluster import runtime_environment
from telescope.cluster.reaper import MARK_VARIABLE, Reaper
from telescope.config import TelescopeConfig
from telescope.errors import ConfigError, DeadlineExceeded, InfrastructureError, RunError
from telescope.inference.base import Address
from telescope.inference.server import EngineStartError
from telescope.trainer import worker

CONFIG = TelescopeConfig.model_validate({"model": "m", "environments": [{"name": "countdown"}]})
INTERFACES = {"127.0.0.1": "lo", "10.0.0.4": "net0"}


@pytest.fixture(autouse=True)
def own_end() -> Iterator[None]:
    """The actors made here are in this process, which is to end as ever."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node at 10.0.0.4, whose environment sets no interfaces."""
    for variable in placement.INTERFACE_VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    monkeypatch.setattr(placement, "interface_of", INTERFACES.get)
    monkeypatch.setattr(placement, "own_address", lambda: "10.0.0.4")
    monkeypatch.setattr(actors, "own_address", lambda: "10.0.0.4")


def interfaces() -> set[str | None]:
    return {os.environ.get(variable) for variable in placement.INTERFACE_VARIABLES}


@pytest.mark.parametrize(("loopback", "expected"), [(True, "lo"), (False, "net0")])
def test_a_rank_has_its_interface_before_torch_meets_the_others(on_a_node, monkeypatch, tmp_path, loopback, expected):
    met: list[set[str | None]] = []

    def trainer(*arguments: object, **options: object) -> SimpleNamespace:
        met.append(interfaces())
        raise InterruptedError("far enough")

    monkeypatch.setattr(worker, "Trainer", trainer)
    actor = TrainerActor(CONFIG.to_json(), 0, 1, str(tmp_path))
    with pytest.raises(InterruptedError):
        actor.setup("10.0.0.9", 1, loopback)
    assert met == [{expected}]


@pytest.mark.parametrize(("loopback", "expected"), [(True, "lo"), (False, "net0")])
def test_vllm_inherits_the_interface_of_its_actor_and_advertises_the_nodes_address(
    on_a_node, tmp_path, loopback, expected
):
    actor = InferenceActor(CONFIG.to_json(), Address(0, "0.0.0.0", 18890, "secret"), str(tmp_path), loopback)
    assert interfaces() == {expected}
    assert actor._server.url == "http://10.0.0.4:18890"


async def raised_in_an_actor(cause: Exception) -> None:
    """Fail as a call of an actor does whose method raised `cause`."""
    text = f"\x1b[36mray::InferenceActor.start()\x1b[39m\n{cause}"
    error = RayTaskError("start", text, pickle.loads(pickle.dumps(cause)), proctitle="ray::start", pid=1, ip="::1")
    raise error.as_instanceof_cause()


@pytest.mark.parametrize("cause", [ConfigError("a port is in use"), RunError("no"), EngineStartError("server 0\nLog")])
async def test_a_user_error_in_an_actor_arrives_unchanged(cause):
    with pytest.raises(type(cause)) as failure:
        await answer(raised_in_an_actor(cause), "start of inference server 0")
    assert type(failure.value) is type(cause)
    assert str(failure.value) == str(cause)
    assert "ray::" not in "".join(traceback.format_exception(failure.value))


@pytest.mark.parametrize("cause", [ValueError("a bug"), InfrastructureError("a lost engine")])
async def test_another_error_in_an_actor_keeps_its_type_and_its_remote_traceback(cause):
    with pytest.raises(type(cause)) as failure:
        await answer(raised_in_an_actor(cause), "training step 3")
    assert str(failure.value) == str(cause)
    assert "ray::InferenceActor.start()" in "".join(traceback.format_exception(failure.value))


async def test_an_answer_that_is_lost_with_its_node_counts_as_the_exit_of_its_actor():
    async def lost() -> None:
        raise ObjectLostError("ab", None, "")

    with pytest.raises(ActorExited, match="rollout worker 1"):
        await answer(lost(), "rollout worker 1")


@pytest.mark.parametrize(("is_alive", "why"), [(True, ""), (False, ": its node gpu-2 is lost")])
async def test_a_server_that_does_not_answer_is_reported_with_its_lost_node(monkeypatch, is_alive, why):
    monkeypatch.setattr(inference_group, "ANSWER_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": "ab", "Alive": is_alive, "NodeManagerHostname": "gpu-2"}])
    actor = Mock()
    actor.status.remote = asyncio.Event().wait
    with pytest.raises(DeadlineExceeded, match=rf"inference server 1 did not answer within 0\.01 s{why}$"):
        await inference_group.ActorHandle(actor, 1, "ab").status()


def test_actors_of_a_joined_cluster_use_the_runs_temporary_directory(monkeypatch, tmp_path):
    """Their nodes have that of the cluster; on another machine the run's directory is not there."""
    for name, value in (("TMPDIR", "/var/tmp"), ("RAY_TMPDIR", ""), ("TORCHINDUCTOR_CACHE_DIR", "")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    with Reaper() as reaper:
        mark = runtime_environment(CONFIG, tmp_path)["env_vars"][MARK_VARIABLE]
        assert mark == str(reaper.directory)
        monkeypatch.setenv("TMPDIR", "/var/tmp")
        monkeypatch.setenv(MARK_VARIABLE, mark)
        actors.use_temporary_directory()
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == mark
    monkeypatch.setenv(MARK_VARIABLE, str(tmp_path / "of another machine"))
    actors.use_temporary_directory()
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == "/var/tmp"
