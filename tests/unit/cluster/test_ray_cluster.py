"""What every actor inherits, and how a cluster is found, started and left. Ray itself is not started here."""

import asyncio
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import ray_constants
from ray._private.runtime_env import uv_runtime_env_hook
from ray._private.services import get_node_ip_address
from ray._private.worker import _maybe_modify_runtime_env
from tests.unit.orchestrator.fakes import config_of

from telescope.cluster import ray_cluster
from telescope.cluster.ray_cluster import Cluster, connect, disconnect, names_of_nodes, runtime_environment
from telescope.config.plan import ClusterResources, NodeResources
from telescope.errors import RunError, UserError

RUN_DIR = Path("/runs/demo")
NODE = {
    "NodeID": "first", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "box", "Alive": True,
    "Resources": {"CPU": 8.0, "GPU": 2.0},
}  # fmt: skip


def cluster_of(*, started_here: bool) -> Cluster:
    return Cluster(started_here, ClusterResources((NodeResources("10.0.0.1", 8.0, 0),)), {"first": "box"}, "first")


class FakeRay:
    """Stands in for the module `ray`: keeps the arguments of `init`, and fails with `errors`."""

    def __init__(self, errors: list[Exception] | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.errors = errors or []
        self.is_running = True
        self.asked: list[str] = []
        self.num_shutdowns = 0
        self.on_init: Callable[[], None] = lambda: None
        self._private = SimpleNamespace(
            worker=SimpleNamespace(_global_node=SimpleNamespace(session_name="session_1", all_processes={}))
        )

    def init(self, **arguments: Any) -> None:
        self.calls.append(arguments)
        self.on_init()
        if self.errors:
            raise self.errors.pop(0)

    def nodes(self) -> list[dict[str, Any]]:
        return [NODE, {**NODE, "NodeManagerAddress": "10.0.0.2", "Alive": False}]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "first")

    def is_initialized(self) -> bool:
        return self.is_running

    def shutdown(self) -> None:
        self.num_shutdowns += 1


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_cluster, "ray", fake)
    monkeypatch.setattr(ray_cluster, "settle_authentication", fake.asked.append)
    monkeypatch.setattr(ray_cluster, "forget_authentication", lambda: fake.asked.append("forgotten"))
    for name in ray_cluster.AUTHENTICATION_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    # `connect` writes to these; setting them here has them put back.
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "1")
    for name in ("memory_monitor_refresh_ms", "prestart_worker_first_driver", "task_events_report_interval_ms"):
        monkeypatch.setenv(f"RAY_{name}", "0")
    monkeypatch.setattr(ray_constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV)
    return fake


VENV = {"VIRTUAL_ENV": "/venvs/telescope", "PATH": f"/venvs/telescope/bin{os.pathsep}/usr/bin"}


@pytest.mark.parametrize(("fields", "prefix", "variables"), [
    ({}, "/venvs/telescope", {"TELESCOPE_RUN_DIR": str(RUN_DIR), "TORCH_DISTRIBUTED_DEBUG": None, **VENV}),
    ({}, sys.base_prefix, {"VIRTUAL_ENV": None}),
    ({"ray_propagate_run_dir": False}, "/venvs/telescope", {"TELESCOPE_RUN_DIR": None, **VENV}),
    ({"ray_propagate_active_venv": False}, "/venvs/telescope", {"VIRTUAL_ENV": None, "PATH": None}),
    ({"debug": True}, sys.base_prefix, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
], ids=["defaults", "no virtual environment", "no run directory", "no propagation", "debug"])  # fmt: skip
def test_actors_get_the_drivers_variables(monkeypatch, fields, prefix, variables):
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setenv("PATH", "/usr/bin")
    made = runtime_environment(config_of(**fields), RUN_DIR)
    assert {name: made["env_vars"].get(name) for name in variables} == variables
    assert made["py_executable"] == sys.executable
    assert "py_executable" not in runtime_environment(config_of(ray_pin_py_executable=False), RUN_DIR)


def test_what_the_user_sets_wins_variable_by_variable():
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


@pytest.mark.parametrize("forwarded", [True, False])
def test_a_running_cluster_is_joined_without_its_dead_nodes(fake_ray, tmp_path, forwarded):
    config = config_of(ray_address="auto", ray_log_to_driver=forwarded)
    cluster = connect(config, RUN_DIR, tmp_path, local_cpus=4, local_gpus=0)
    assert not cluster.started_here
    assert (cluster.node_names, cluster.driver_node) == ({"first": "box"}, "first")
    assert cluster.resources.nodes == (NodeResources("10.0.0.1", 8.0, 2),)
    (call,) = fake_ray.calls
    expected = {"address": "auto", "namespace": config.ray_namespace, "log_to_driver": forwarded}
    assert {name: call[name] for name in expected} == expected
    assert "num_cpus" not in call, "a cluster that runs has resources of its own"


def test_a_cluster_started_here_uses_loopback_only(fake_ray, monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
    before = dict(os.environ)
    seen: list[Any] = []
    monkeypatch.setattr(fake_ray, "on_init", lambda: seen.append((get_node_ip_address(), dict(os.environ))))
    connect(config_of(ray_address="local"), RUN_DIR, tmp_path, local_cpus=1, local_gpus=0)
    ((address, environment),) = seen
    assert address == "127.0.0.1"
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "for the processes that Ray starts"
    assert {name for name in os.environ.keys() - before.keys() if "CLUSTER" in name} == set()


def test_without_a_cluster_one_is_started_here(fake_ray, tmp_path):
    fake_ray.errors = [ConnectionError("no cluster")]
    cluster = connect(config_of(ray_address="auto"), RUN_DIR, tmp_path, local_cpus=3.5, local_gpus=1)
    assert cluster.started_here
    assert fake_ray.asked == ["auto", "forgotten"], "whether a token is shown is for the new cluster to say"
    assert (fake_ray.calls[1]["address"], fake_ray.calls[1]["num_cpus"], fake_ray.calls[1]["num_gpus"]) == (
        "local", 4, 1,
    )  # fmt: skip
    assert fake_ray.calls[1]["include_dashboard"] is False


@pytest.mark.parametrize(("fields", "error"), [
    ({"ray_address": "10.0.0.9:6379"}, ConnectionError("refused")),
    ({"ray_address": "auto", "ray_auto_start_local": False}, ConnectionError("no cluster")),
    ({"ray_address": "auto"}, RuntimeError("versions differ")),
])  # fmt: skip
def test_a_missing_cluster_that_was_requested_is_a_user_error(fields, error, fake_ray, tmp_path):
    fake_ray.errors = [error]
    with pytest.raises(UserError, match=r"ray_address: .* cannot be reached .*ray_auto_start_local"):
        connect(config_of(**fields), RUN_DIR, tmp_path, local_cpus=4, local_gpus=0)
    assert len(fake_ray.calls) == 1


@pytest.mark.parametrize("off", [True, False])
def test_ray_rewrites_runtime_environments_only_if_configured(fake_ray, monkeypatch, off, tmp_path):
    """Under `uv run`, and where RAY_RUNTIME_ENV_HOOK names a hook. Ray has read the first switch when it was imported,
    so what counts is what its own function does afterwards."""
    monkeypatch.setattr(ray_constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", True)
    monkeypatch.setattr(uv_runtime_env_hook, "_get_uv_run_cmdline", lambda: ["uv", "run", "train.py"])
    monkeypatch.setattr(uv_runtime_env_hook, "hook", lambda env: {**env, "rewritten": True})
    connect(config_of(ray_disable_runtime_env_hook=off), RUN_DIR, tmp_path, local_cpus=4, local_gpus=0)
    (call,) = fake_ray.calls
    assert _maybe_modify_runtime_env({}, call["_skip_env_hook"]) == ({} if off else {"rewritten": True})
    assert os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == ("0" if off else "1")
    monkeypatch.setattr(uv_runtime_env_hook, "_get_uv_run_cmdline", lambda: None)
    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "tests.unit.cluster.test_ray_cluster.hook_of_the_site")
    assert _maybe_modify_runtime_env({}, call["_skip_env_hook"]) == ({} if off else {"by_the_site": True})


def hook_of_the_site(env: dict[str, Any]) -> dict[str, Any]:
    return {**env, "by_the_site": True}


def test_settings_of_nccl_and_gloo_reach_the_workers_of_any_cluster(monkeypatch):
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("GLOO_SOCKET_IFNAME", "eth7"), ("NCCL_DEBUG", "WARN")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ANOTHER_SECRET", "x")
    config = config_of(ray_runtime_env={"env_vars": {"NCCL_DEBUG": "INFO"}})
    variables = runtime_environment(config, RUN_DIR)["env_vars"]
    assert (variables["NCCL_NVLS_ENABLE"], variables["GLOO_SOCKET_IFNAME"]) == ("0", "eth7")
    assert variables["NCCL_DEBUG"] == "INFO", "the field wins"
    assert "ANOTHER_SECRET" not in variables


def test_nodes_with_equal_host_names_also_show_their_addresses():
    twin = {**NODE, "NodeID": "second", "NodeManagerAddress": "10.0.0.2"}
    assert names_of_nodes([NODE, {**twin, "NodeManagerHostname": "shelf"}]) == {"first": "box", "second": "shelf"}
    assert names_of_nodes([NODE, twin]) == {"first": "box (10.0.0.1)", "second": "box (10.0.0.2)"}


@pytest.mark.parametrize(("started_here", "asked", "stops"), [(False, True, 1), (False, False, 0), (True, True, 0)])
def test_a_joined_cluster_is_stopped_only_if_configured(started_here, asked, stops, fake_ray, monkeypatch):
    stopped: list[str] = []
    monkeypatch.setattr(ray_cluster, "_stop_session", stopped.append)
    disconnect(cluster_of(started_here=started_here), config_of(ray_shutdown_on_exit=asked))
    assert fake_ray.num_shutdowns == 1, "this ends one that was started here"
    assert stopped == ["session_1"] * stops
    fake_ray.is_running = False
    disconnect(cluster_of(started_here=started_here), config_of())
    assert fake_ray.num_shutdowns == 1


@pytest.mark.parametrize(("error", "words"), [
    (Exception("The current node timed out during startup."), "machine: The current node timed out during startup. "),
    (AssertionError(), "machine: AssertionError. "),
])  # fmt: skip
def test_a_failed_start_of_ray_reports_its_error_and_keeps_its_logs(fake_ray, monkeypatch, tmp_path, error, words):
    logs = tmp_path / "ray" / "session_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("no space")
    (tmp_path / "ray" / "session_latest").symlink_to(logs.parent)
    fake_ray.errors = [error, error]
    with pytest.raises(RunError) as raised:
        connect(config_of(ray_address="local"), tmp_path / "run", tmp_path, local_cpus=2, local_gpus=0)
    assert words in str(raised.value)
    kept = tmp_path / "run" / "logs" / "ray"
    assert str(kept) in str(raised.value)
    assert (kept / "raylet.err").read_text() == "no space"


def test_a_slow_start_of_ray_is_tried_again_unless_it_is_cancelled(fake_ray, tmp_path):
    def start(**options: Any) -> Cluster:
        return connect(config_of(ray_address="local"), tmp_path, tmp_path, local_cpus=2, local_gpus=0, **options)

    fake_ray.errors = [RuntimeError("The current node timed out during startup. This could happen because ...")]
    assert start().started_here
    assert len(fake_ray.calls) == 2
    assert fake_ray.num_shutdowns == 1, "what came up of the first is ended"
    stopped = threading.Event()
    fake_ray.on_init = stopped.set
    fake_ray.errors = [RuntimeError("The current node timed out during startup.")] * 2
    with pytest.raises(RunError):
        start(stopped=stopped)
    assert len(fake_ray.calls) == 3


def test_a_cluster_started_here_has_a_private_directory_and_a_token_of_its_own(fake_ray, tmp_path):
    seen: list[str | None] = []
    fake_ray.on_init = lambda: seen.append(os.environ.get("RAY_AUTH_TOKEN_PATH"))
    cluster = connect(config_of(ray_address="local"), RUN_DIR, tmp_path, local_cpus=1, local_gpus=0)
    (path,) = seen
    token = Path(path)
    assert token.parent == tmp_path
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    # Ray makes the directory that it is given writable for everyone.
    assert Path(fake_ray.calls[0]["_temp_dir"]).parent == tmp_path
    disconnect(cluster, config_of())
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


@pytest.mark.parametrize("name", ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_of_the_user_is_left_alone(fake_ray, monkeypatch, tmp_path, name):
    monkeypatch.setenv(name, "of the user")
    cluster = connect(config_of(ray_address="local"), RUN_DIR, tmp_path, local_cpus=1, local_gpus=0)
    assert not list(tmp_path.iterdir())
    disconnect(cluster, config_of())
    assert os.environ[name] == "of the user"


@pytest.fixture
def daemons(fake_ray: FakeRay, tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Two processes in place of Ray's daemons, with logs in `tmp_path`."""
    running = {name: subprocess.Popen(["sleep", "600"]) for name in ("gcs_server", "raylet")}
    node = fake_ray._private.worker._global_node
    node.all_processes = {name: [SimpleNamespace(process=process)] for name, process in running.items()}
    node.get_logs_dir_path = lambda: str(tmp_path)
    yield running
    for process in running.values():
        process.kill()
        process.wait()


async def test_a_killed_ray_daemon_is_named_with_its_signal_and_log(fake_ray, daemons, tmp_path):
    time = "[2026-11-22 13:50:24,210 I 13038 13038] (raylet) node_manager.cc:1307:"
    dump = (
        f"{time} Debug state:\nGcsActorManager: \n- actors: 0\n{time} Main service Event stats:\n\tProbe - 60 total\n"
    )
    (tmp_path / "raylet.out").write_text(f"{time} last words\n{time} [state-dump] Node:\n[state-dump] noise\n{dump}")
    watching = asyncio.create_task(ray_cluster.watch_daemons(poll_seconds=0.01))
    await asyncio.sleep(0.05)
    assert not watching.done()
    daemons["raylet"].kill()
    with pytest.raises(RunError) as raised:
        await asyncio.wait_for(watching, 10)
    assert str(raised.value) == (
        f"Ray's raylet (process {daemons['raylet'].pid}) was killed by SIGKILL. Its log ends:\n{time} last words"
    )
    disconnect(cluster_of(started_here=True), config_of())
    assert fake_ray.num_shutdowns == 0, "Ray would wait for its daemon"


def test_advice_of_rays_daemons_goes_to_the_log_and_lines_of_actors_to_the_terminal(monkeypatch, caplog):
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(ray_cluster.ray_worker, "print_to_stdstream", lambda data, ignore_prefix: shown.append(data))
    for _ in range(2):
        ray_cluster._log_advice()
    with caplog.at_level("INFO"):
        for pid in ("raylet", 7):
            data = {"lines": ["A worker died"], "pid": pid, "is_err": False}
            ray_cluster.ray_worker.print_to_stdstream(data, ignore_prefix=False)
    assert [data["pid"] for data in shown] == [7]
    assert caplog.messages == ["Ray: A worker died"]
