"""Real processes: the fake engine under the supervisor that runs vLLM."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.fakes.backend import FakeBackend
from tests.fakes.engine import FakeEngineSettings
from tests.processes import free_port, wait_for

from telescope.config import TelescopeConfig, load_config
from telescope.config.machine import listen_problem
from telescope.errors import ConfigError, InfrastructureError
from telescope.inference.auth import SECRET_VARIABLE
from telescope.inference.base import Address, GenerateRequest, LaunchCommand
from telescope.inference.client import EngineClient
from telescope.inference.engine_metrics import metrics_reader
from telescope.inference.process import EngineProcess, group_members
from telescope.inference.server import EngineStartError, InferenceServer, SupervisionLimits
from telescope.inference.vllm import launch as launch_module
from telescope.inference.vllm.launch import ROUNDING_BYTES

SECRET = "a-secret"
QUICK = SupervisionLimits(
    start_timeout=30, stop_grace=3, unhealthy_seconds=5, max_restarts=2, first_backoff=0.05, longest_backoff=0.1
)


@pytest.fixture
def config() -> TelescopeConfig:
    return load_config(None, ["--environments", '[{"name": "countdown"}]']).config


@pytest.fixture
def make_server(config: TelescopeConfig, tmp_path: Path) -> Iterator[Callable[..., InferenceServer]]:
    servers: list[InferenceServer] = []

    def make(
        settings: FakeEngineSettings | None = None, limits: SupervisionLimits = QUICK, port: int = 0, script: Any = None
    ) -> InferenceServer:
        """Returns a server of the fake engine, or of a script of Python that gets the port, then what follows it."""
        address = Address(0, "127.0.0.1", port or free_port(), SECRET)
        encoded = msgspec.json.encode(settings or FakeEngineSettings(spawn_child=True)).decode()

        def launch(*given: Any, **fields: Any) -> LaunchCommand:
            if script:
                return LaunchCommand([sys.executable, "-c", script[0], str(address.port), *script[1:]], {})
            command = FakeBackend.launch(*given, **fields)
            return LaunchCommand([*command.arguments, "--settings", encoded], command.environment)

        backend = type("Backend", (EngineClient,), {"launch": staticmethod(launch)})
        servers.append(InferenceServer(config, address, "model", tmp_path, limits=limits, backend=backend))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


def engine_pids(group: int) -> list[int]:
    """The processes of the engine: the group without its shim."""
    return [pid for pid in group_members(group) if pid != group]


def test_start_answers_and_stop_leaves_no_process(make_server):
    server = make_server()
    info = server.start()
    assert server.status().state == "ready"
    assert info.url == f"http://127.0.0.1:{server.address.port}"
    assert info.config_hash == server.config.hash
    assert len(group_members(info.pid)) == 3  # shim, engine, the engine's child
    server.stop()
    assert group_members(info.pid) == []
    assert server.status().state == "stopped"
    server.stop()  # twice is fine


async def test_killed_engine_is_restarted_and_samples_nothing_until_updated(make_server):
    server = make_server()
    info = server.start()
    old = engine_pids(info.pid)
    os.kill(min(old), signal.SIGKILL)
    wait_for(lambda: server.status().restarts == 1 and server.status().state == "ready", "restart")
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in old), "end of the old group")
    client = EngineClient(server.url, SECRET)
    request = GenerateRequest("r", [1, 2], 4, 1.0, seed=1)
    with pytest.raises(Exception, match="has not received the current weights"):
        await client.generate(request)
    await client.pause()
    await client.start_update()
    await client.finish_update(7)
    await client.resume()
    assert (await client.generate(request)).version_spans == [(7, 0, 4)]
    await client.close()


def test_a_killed_server_on_a_shared_gpu_restarts_with_its_cache_size(tmp_path, monkeypatch):
    """By then the trainer is on the GPU, and vLLM could measure nothing there (`start_command`)."""
    shared = ["--environments", '[{"name": "countdown"}]', "--share_gpus=true"]
    config = load_config(None, [*shared, "--inference_num_workers=1", "--trainer_num_workers=1"]).config
    port = free_port()
    words = "print('Available KV cache memory: 7.50 GiB', flush=True)"
    script = f"{words}; import runpy; runpy.run_module('tests.fakes.server', run_name='__main__')"
    given: list[int | None] = []

    def launch(*_: object, **fields: object) -> LaunchCommand:
        given.append(fields["kv_cache_bytes"])  # type: ignore[arg-type]
        settings = msgspec.json.encode(FakeEngineSettings()).decode()
        arguments = [sys.executable, "-c", script, "--port", str(port), "--settings", settings]
        return LaunchCommand(arguments, {SECRET_VARIABLE: SECRET})

    monkeypatch.setattr(launch_module, "launch_command", launch)
    monkeypatch.setattr(launch_module, "runs_on_cpu", lambda config: False)
    model = str(tmp_path / "model")  # a folder, so that nothing asks the hub
    server = InferenceServer(config, Address(0, "127.0.0.1", port, SECRET), model, tmp_path, limits=QUICK)
    try:
        os.kill(server.start().pid, signal.SIGKILL)
        wait_for(lambda: server.status().restarts == 1 and server.status().state == "ready", "restart")
    finally:
        server.stop()
    assert given == [None, int(7.5 * 2**30) - ROUNDING_BYTES]


def test_an_engine_that_keeps_exiting_is_given_up(make_server):
    server = make_server()
    info = server.start()
    seen: set[int] = set()

    def kill_and_look() -> bool:
        status = server.status()
        if status.state == "ready" and status.pid not in seen:
            seen.add(status.pid)
            os.kill(status.pid, signal.SIGKILL)  # the shim itself; its group must follow
        return status.state == "failed"

    wait_for(kill_and_look, "giving up", 40)
    assert len(seen) == QUICK.max_restarts + 1
    assert info.pid in seen
    assert "gave up after 2 restarts" in (server.status().error or "")
    wait_for(lambda: not any(group_members(pid) for pid in seen), "end of all groups")


def test_a_server_whose_processes_cannot_be_killed_has_failed(make_server, monkeypatch):
    server = make_server()
    info = server.start()
    kill = EngineProcess.kill

    def hangs(self: EngineProcess) -> None:
        kill(self)
        raise InfrastructureError("processes [7] still exist 30 s after SIGKILL")

    monkeypatch.setattr(EngineProcess, "kill", hangs)
    os.kill(info.pid, signal.SIGKILL)
    wait_for(lambda: server.status().state == "failed", "noticing")
    monkeypatch.undo()
    assert "was killed by SIGKILL; processes [7] still exist" in (server.status().error or "")


def test_an_engine_that_is_stopped_is_noticed_by_its_health_check_and_restarted(make_server, monkeypatch):
    monkeypatch.setattr("telescope.inference.server.HEALTH_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr("telescope.inference.server.HEALTH_INTERVAL_SECONDS", 0.1)
    limits = SupervisionLimits(start_timeout=60, stop_grace=3, unhealthy_seconds=2, first_backoff=0.05)
    server = make_server(limits=limits)
    info = server.start()
    for pid in group_members(info.pid):
        if pid != info.pid:
            os.kill(pid, signal.SIGSTOP)
    errors = set()
    wait_for(lambda: errors.add(server.status().error) or server.status().restarts == 1, "restart", 60)
    wait_for(lambda: server.status().state == "ready", "ready again", 60)
    assert any("did not answer for" in (error or "") for error in errors)
    assert group_members(info.pid) == []


STOPS_LISTENING = """
import http.server, sys, threading, time

health_requested = threading.Event()

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        health_requested.set()

server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy)
threading.Thread(target=server.serve_forever, daemon=True).start()
health_requested.wait()
time.sleep(1)
server.shutdown()
server.server_close()
time.sleep(600)
"""


def test_an_engine_that_closed_its_port_and_lingers_is_restarted_at_once(make_server):
    """As vLLM's server does that has lost one of several workers."""
    server = make_server(limits=replace(QUICK, unhealthy_seconds=1000), script=[STOPS_LISTENING])
    server.start()
    wait_for(lambda: server.status().restarts == 1, "a restart")
    assert "no longer listens" in (server.status().error or "")


GETS_ILL = """
import http.server, pathlib, sys

class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_ill = pathlib.Path(sys.argv[3]).exists()
        status, body = (503, sys.argv[2].encode()) if is_ill else (200, b"")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
"""


@pytest.mark.parametrize(("body", "words"), [
    ("", "HTTP 503: its engine has exited"), ('{"error":{"message":"it hangs","code":503}}', "HTTP 503: it hangs"),
])  # fmt: skip
def test_the_engines_own_error_is_the_reason_for_its_restart(make_server, tmp_path, monkeypatch, body, words):
    monkeypatch.setattr("telescope.inference.server.HEALTH_INTERVAL_SECONDS", 0.1)
    script = [GETS_ILL, body, str(tmp_path / "ill")]
    server = make_server(limits=replace(QUICK, max_restarts=0), script=script)
    server.start()
    (tmp_path / "ill").touch()
    wait_for(lambda: server.status().state == "failed", "giving up")
    assert words in (server.status().error or "")


def test_a_killed_shim_ends_a_command_that_does_not_watch_yet(tmp_path):
    process = EngineProcess([sys.executable, "-c", "import time; time.sleep(600)"], {}, tmp_path / "log")
    wait_for(lambda: len(group_members(process.pid)) == 2, "start of the command")
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: group_members(process.pid) == [], "end of the group")


def test_a_process_that_the_kernel_does_not_end_is_reported(tmp_path, monkeypatch):
    process = EngineProcess([sys.executable, "-c", "import time; time.sleep(600)"], {}, tmp_path / "log")
    with monkeypatch.context() as hung:
        hung.setattr("telescope.inference.process.kill_group", lambda pid: None)
        hung.setattr("telescope.inference.process.KILL_SECONDS", 0.1)
        with pytest.raises(InfrastructureError, match=rf"{process.pid}.* still exist"):
            process.kill()
    process.kill()


def test_a_failed_start_shows_the_last_lines_and_the_fix_and_releases_the_port(make_server):
    server = make_server(FakeEngineSettings(fail_start="ValueError: No available memory for the cache blocks."))
    started = time.monotonic()
    with pytest.raises(EngineStartError) as failure:
        server.start()
    assert time.monotonic() - started < QUICK.start_timeout
    assert "exit code 1" in str(failure.value)
    assert "No available memory" in str(failure.value)
    assert "raise gpu_memory_utilization" in str(failure.value)
    assert server.status().state == "failed"
    assert listen_problem("127.0.0.1", server.address.port) is None


def test_a_start_that_takes_too_long_is_ended(make_server):
    limits = SupervisionLimits(start_timeout=1.0, stop_grace=1.0)
    server = make_server(FakeEngineSettings(start_seconds=60), limits)
    with pytest.raises(EngineStartError, match="inference_start_timeout_seconds"):
        server.start()
    assert group_members(server._process.pid) == []


def test_a_port_is_reserved_when_a_server_begins_to_start(make_server):
    """Long before vLLM binds it: a second run that starts meanwhile must not find out after its own vLLM has loaded."""
    first = make_server(FakeEngineSettings(start_seconds=600))
    starting = threading.Thread(target=pytest.raises, args=(EngineStartError, first.start))
    starting.start()
    wait_for(lambda: first.status().pid is not None, "launch of the first")
    second = make_server(port=first.address.port)
    with pytest.raises(ConfigError) as failure:
        second.start()
    assert second._process is None
    assert f"port {first.address.port}, which server 0 would listen on, is in use" in str(failure.value)
    assert "set inference_base_port for example to" in str(failure.value)
    first.stop()
    starting.join(timeout=30)
    assert listen_problem("127.0.0.1", first.address.port) is None


PARENT = """
import json, sys, time
from telescope.config import load_config
from telescope.inference.server import InferenceServer
from telescope.inference.base import Address, LaunchCommand
from telescope.inference.client import EngineClient
port, run_dir, command, environment = json.loads(sys.argv[1])
config = load_config(None, ["--environments", '[{"name": "countdown"}]']).config
class Backend(EngineClient):
    launch = staticmethod(lambda *_, **__: LaunchCommand(command, environment))
server = InferenceServer(config, Address(0, "127.0.0.1", port, "a-secret"), "model", run_dir, backend=Backend)
print(server.start().pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_exits_with_its_parent(tmp_path, how):
    port = free_port()
    command = [sys.executable, "-m", "tests.fakes.server", "--port", str(port)]
    command += ["--settings", '{"spawn_child": true}']
    arguments = json.dumps([port, str(tmp_path), command, {SECRET_VARIABLE: SECRET}])
    parent = subprocess.Popen([sys.executable, "-c", PARENT, arguments], stdout=subprocess.PIPE, text=True)
    group = int(parent.stdout.readline())
    assert len(group_members(group)) == 3
    parent.send_signal(how)
    parent.wait(timeout=20)
    wait_for(lambda: group_members(group) == [], "end of the engine")
    parent.stdout.close()


def test_a_ready_server_reports_metrics_only_with_the_secret(make_server):
    server = make_server()
    assert server.metrics_text() is None
    server.start()
    names = {reading.name for reading in metrics_reader(server.metrics_text)()}
    assert "vllm:num_requests_running" in names
    server.address = replace(server.address, secret="another")
    with pytest.raises(OSError, match="401"):
        server.metrics_text()
    server.stop()
    assert server.metrics_text() is None
