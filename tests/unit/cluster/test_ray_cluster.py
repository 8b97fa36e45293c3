"""What every actor inherits, and how a cluster is found, started and left. Ray itself is not started here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.services import get_node_ip_address

from telescope.cluster import ray_cluster
from telescope.cluster.inference_group import bind_host
from telescope.cluster.ray_cluster import Cluster, connect, disconnect, runtime_environment
from telescope.config import TelescopeConfig
from telescope.config.plan import ClusterResources, NodeResources
from telescope.errors import RunError, UserError

RUN_DIR = Path("/runs/demo")
NODE = {"NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}


def config_of(**fields: Any) -> TelescopeConfig:
    return TelescopeConfig.model_validate({"model": "m", "environments": [{"name": "countdown"}], **fields})


def nodes(count: int) -> ClusterResources:
    return ClusterResources(tuple(NodeResources(f"10.0.0.{index}", 8.0, 0) for index in range(count)))


class FakeRay:
    """Stands in for the module `ray`: keeps the arguments of `init`, and fails as `errors` says."""

    def __init__(self, errors: list[Exception] | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.errors = errors or []
        self.is_running = True
        self.num_shutdowns = 0
        self.on_init: Callable[[], None] = lambda: None

    def init(self, **arguments: Any) -> None:
        self.calls.append(arguments)
        self.on_init()
        if self.errors:
            raise self.errors.pop(0)

    def nodes(self) -> list[dict[str, Any]]:
        return [NODE, {**NODE, "NodeManagerAddress": "10.0.0.2", "Alive": False}]

    def is_initialized(self) -> bool:
        return self.is_running

    def shutdown(self) -> None:
        self.num_shutdowns += 1


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_cluster, "ray", fake)
    # `connect` writes to these; setting them here has them put back.
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "1")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    return fake


def test_actors_run_the_drivers_interpreter_and_know_the_run_directory() -> None:
    made = runtime_environment(config_of(), RUN_DIR)
    assert made["py_executable"] == sys.executable
    assert made["env_vars"]["TELESCOPE_RUN_DIR"] == str(RUN_DIR)


def test_each_propagation_can_be_switched_off() -> None:
    made = runtime_environment(
        config_of(ray_pin_py_executable=False, ray_propagate_run_dir=False, ray_propagate_active_venv=False), RUN_DIR
    )
    assert "py_executable" not in made
    assert not {"TELESCOPE_RUN_DIR", "VIRTUAL_ENV", "PATH"} & set(made["env_vars"])


def test_the_active_environment_comes_first_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/venvs/telescope")
    monkeypatch.setenv("PATH", "/usr/bin")
    variables = runtime_environment(config_of(), RUN_DIR)["env_vars"]
    assert variables["VIRTUAL_ENV"] == "/venvs/telescope"
    assert variables["PATH"] == f"/venvs/telescope/bin{os.pathsep}/usr/bin"


def test_outside_a_virtual_environment_none_is_propagated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert "VIRTUAL_ENV" not in runtime_environment(config_of(), RUN_DIR)["env_vars"]


def test_what_the_user_sets_wins_variable_by_variable() -> None:
    user = {
        "env_vars": {"TELESCOPE_RUN_DIR": "/elsewhere", "NCCL_DEBUG": "INFO"},
        "py_executable": "/opt/python",
        "pip": ["x"],
    }
    config = config_of(ray_runtime_env=user)
    made = runtime_environment(config, RUN_DIR)
    assert made["env_vars"]["TELESCOPE_RUN_DIR"] == "/elsewhere"
    assert made["env_vars"]["NCCL_DEBUG"] == "INFO"
    assert made["env_vars"]["TOKENIZERS_PARALLELISM"] == "false", "what the user does not name stays"
    assert (made["py_executable"], made["pip"]) == ("/opt/python", ["x"])
    assert config.ray_runtime_env == user, "the config is not touched"


def test_debug_asks_torch_for_more() -> None:
    assert "TORCH_DISTRIBUTED_DEBUG" not in runtime_environment(config_of(), RUN_DIR)["env_vars"]
    assert runtime_environment(config_of(debug=True), RUN_DIR)["env_vars"]["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"


@pytest.mark.parametrize(
    ("num_nodes", "fields", "expected"),
    [
        (1, {}, "127.0.0.1"),
        (1, {"inference_host": "0.0.0.0"}, "0.0.0.0"),
        (1, {"inference_host": "10.0.0.7"}, "10.0.0.7"),
        (2, {"inference_host": "10.0.0.7"}, "10.0.0.7"),
    ],
)
def test_servers_of_one_node_listen_on_loopback_unless_the_user_names_a_host(
    num_nodes: int, fields: dict[str, Any], expected: str
) -> None:
    assert bind_host(config_of(**fields), Cluster(True, nodes(num_nodes))) == expected


def test_servers_of_several_nodes_listen_where_the_default_says() -> None:
    config = config_of()
    assert bind_host(config, Cluster(False, nodes(2))) == config.inference_host


def test_a_cluster_that_runs_is_joined_and_its_dead_nodes_are_not_counted(fake_ray: FakeRay) -> None:
    cluster = connect(config_of(ray_address="auto"), RUN_DIR, local_cpus=4, local_gpus=0)
    assert not cluster.started_here
    assert cluster.is_single_node
    assert cluster.resources.nodes == (NodeResources("10.0.0.1", 8.0, 2),)
    (call,) = fake_ray.calls
    assert call["address"] == "auto"
    assert call["namespace"] == config_of().ray_namespace
    assert "num_cpus" not in call, "a cluster that runs has resources of its own"


def test_a_cluster_that_is_started_here_is_told_that_there_is_only_loopback(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
    before = dict(os.environ)
    seen: list[Any] = []
    monkeypatch.setattr(fake_ray, "on_init", lambda: seen.append((get_node_ip_address(), dict(os.environ))))
    connect(config_of(ray_address="local"), RUN_DIR, local_cpus=1, local_gpus=0)
    ((address, environment),) = seen
    assert address == "127.0.0.1"
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "for the processes that Ray starts"
    assert {name for name in os.environ.keys() - before.keys() if "CLUSTER" in name} == set()


def test_without_a_cluster_one_is_started_here(fake_ray: FakeRay) -> None:
    fake_ray.errors = [ConnectionError("no cluster")]
    cluster = connect(config_of(ray_address="auto"), RUN_DIR, local_cpus=3.5, local_gpus=1)
    assert cluster.started_here
    assert (fake_ray.calls[1]["address"], fake_ray.calls[1]["num_cpus"], fake_ray.calls[1]["num_gpus"]) == (
        "local",
        4,
        1,
    )
    assert fake_ray.calls[1]["include_dashboard"] is False


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"ray_address": "10.0.0.9:6379"}, ConnectionError("refused")),
        ({"ray_address": "auto", "ray_auto_start_local": False}, ConnectionError("no cluster")),
        ({"ray_address": "auto"}, RuntimeError("versions differ")),
    ],
)
def test_a_cluster_that_was_asked_for_and_is_not_there_is_the_users_to_mend(
    fields: dict[str, Any], error: Exception, fake_ray: FakeRay
) -> None:
    fake_ray.errors = [error]
    with pytest.raises(UserError, match=r"ray_address: .* cannot be reached .*ray_auto_start_local"):
        connect(config_of(**fields), RUN_DIR, local_cpus=4, local_gpus=0)
    assert len(fake_ray.calls) == 1


def test_the_hook_of_uv_run_is_off_only_if_so_configured(fake_ray: FakeRay) -> None:
    connect(config_of(ray_disable_runtime_env_hook=False), RUN_DIR, local_cpus=4, local_gpus=0)
    assert os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "1"
    connect(config_of(ray_disable_runtime_env_hook=True), RUN_DIR, local_cpus=4, local_gpus=0)
    assert os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"


@pytest.mark.parametrize(("started_here", "asked", "stops"), [(False, True, 1), (False, False, 0), (True, True, 0)])
def test_a_cluster_of_others_is_ended_only_when_asked(
    started_here: bool, asked: bool, stops: int, fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Any] = []
    monkeypatch.setattr(ray_cluster, "subprocess", SimpleNamespace(run=lambda *a, **k: commands.append(a)))
    disconnect(Cluster(started_here, nodes(1)), config_of(ray_shutdown_on_exit=asked))
    assert fake_ray.num_shutdowns == 1, "this ends one that was started here"
    assert len(commands) == stops
    fake_ray.is_running = False
    disconnect(Cluster(started_here, nodes(1)), config_of())
    assert fake_ray.num_shutdowns == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            Exception("The current node timed out during startup."),
            "machine: The current node timed out during startup. ",
        ),
        (AssertionError(), "machine: AssertionError. "),
    ],
)
def test_a_ray_that_does_not_start_is_told_in_its_own_words_with_its_logs(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, words: str
) -> None:
    logs = tmp_path / "ray" / "session_1" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "ray" / "session_latest").symlink_to(logs.parent)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    fake_ray.errors = [error, error]
    with pytest.raises(RunError) as raised:
        connect(config_of(ray_address="local"), RUN_DIR, local_cpus=2, local_gpus=0)
    assert words in str(raised.value)
    assert str(logs) in str(raised.value)


def test_a_ray_that_is_too_slow_the_first_time_is_started_again(fake_ray: FakeRay) -> None:
    fake_ray.errors = [RuntimeError("The current node timed out during startup. This could happen because ...")]
    assert connect(config_of(ray_address="local"), RUN_DIR, local_cpus=2, local_gpus=0).started_here
    assert len(fake_ray.calls) == 2
    assert fake_ray.num_shutdowns == 1, "what came up of the first is ended"
