"""What cloud providers do beyond the contract: settings, errors, detached commands, keys."""

import asyncio
import importlib
import json
import re
import signal
import sys
import time
import uuid
from typing import Any

import pytest
from tests.unit.sandbox.conftest import KEYS, MODULES, docker_calls
from tests.unit.sandbox.signatures import RECORDED, parameters

from telescope.errors import UserError
from telescope.sandbox import (
    ExecResult,
    SandboxBusyError,
    SandboxCommandTimeoutError,
    SandboxConfig,
    SandboxError,
    SandboxHandle,
    SandboxImagePullError,
    SandboxNotRunningError,
    SandboxOOMError,
    SandboxSetupError,
    get_provider,
    remote,
)

CLOUDS = list(MODULES)
LATE, GONE, SETUP = SandboxCommandTimeoutError, SandboxNotRunningError, SandboxSetupError
PULL, BUSY, OTHER = SandboxImagePullError, SandboxBusyError, SandboxError
ERRORS: list[tuple[str, str, str, type[Exception]]] = [
    ("prime", "CommandTimeoutError", "", LATE), ("prime", "UploadTimeoutError", "", OTHER),
    ("prime", "DownloadTimeoutError", "", OTHER), ("prime", "SandboxOOMError", "", SandboxOOMError),
    ("prime", "SandboxNotRunningError", "", GONE), ("prime", "SandboxTimeoutError", "", GONE),
    ("prime", "SandboxImagePullError", "", PULL), ("prime", "UnauthorizedError", "", SETUP),
    ("prime", "PaymentRequiredError", "", SETUP), ("prime", "APITimeoutError", "", BUSY),
    ("prime", "APIError", "HTTP 429: slow down", BUSY), ("prime", "APIError", "HTTP 503: later", BUSY),
    ("prime", "APIError", "HTTP 404: none", GONE), ("prime", "APIError", "HTTP 400: a bad request", OTHER),
    ("modal", "ExecTimeoutError", "", LATE), ("modal", "TimeoutError", "was not scheduled", OTHER),
    ("modal", "SandboxTimeoutError", "", GONE), ("modal", "SandboxTerminatedError", "", GONE),
    ("modal", "NotFoundError", "", GONE), ("modal", "ClientClosed", "", GONE), ("modal", "ImageBuildError", "", PULL),
    ("modal", "ResourceExhaustedError", "", BUSY), ("modal", "ServiceError", "", BUSY),
    ("modal", "InternalFailure", "", BUSY), ("modal", "ConnectionError", "", BUSY), ("modal", "AuthError", "", SETUP),
    ("modal", "PermissionDeniedError", "", SETUP), ("modal", "RemoteError", "", OTHER),
    ("daytona", "DaytonaProcessExecutionTimeoutError", "", LATE),
    ("daytona", "DaytonaConnectionTimeoutError", "", OTHER), ("daytona", "DaytonaTimeoutError", "504", OTHER),
    ("daytona", "DaytonaNotFoundError", "", GONE), ("daytona", "DaytonaFileNotFoundError", "", OTHER),
    ("daytona", "DaytonaFileAccessDeniedError", "/app/build/x", OTHER),
    ("daytona", "DaytonaGoneError", "", GONE), ("daytona", "DaytonaSpotEvictedError", "", GONE),
    ("daytona", "DaytonaQueueTimeoutError", "", GONE), ("daytona", "DaytonaError", "build failed", PULL),
    ("daytona", "DaytonaError", "resource limit reached", OTHER), ("daytona", "DaytonaRateLimitError", "", BUSY),
    ("daytona", "DaytonaBadGatewayError", "", BUSY), ("daytona", "DaytonaServiceUnavailableError", "", BUSY),
    ("daytona", "DaytonaConnectionError", "", BUSY), ("daytona", "DaytonaAuthenticationError", "", SETUP),
    ("daytona", "DaytonaForbiddenError", "", SETUP), ("e2b", "TimeoutException", "deadline", LATE),
    ("e2b", "TimeoutException", "canceled: The request was cancelled by the server or a proxy", OTHER),
    ("e2b", "SandboxNotRunningException", "", GONE), ("e2b", "SandboxNotFoundException", "", GONE),
    ("e2b", "SandboxUnreachableException", "", OTHER), ("e2b", "BuildException", "", PULL),
    ("e2b", "TemplateException", "", PULL), ("e2b", "RateLimitException", "", BUSY),
    ("e2b", "ServiceBusyException", "", BUSY), ("e2b", "AuthenticationException", "", SETUP),
]  # fmt: skip


@pytest.mark.parametrize(("name", "error", "message", "expected"), ERRORS)
async def test_error_of_the_sdk_becomes_ours(trial, machine, name, error, message, expected):
    kind = getattr(sys.modules[MODULES[name]], error)
    handle = await trial.shared()
    machine.failures["execute"] = kind(message)
    with pytest.raises((SandboxError, SandboxSetupError)) as found:
        await trial.provider.execute(handle, "true")
    assert found.type is expected
    calls = {
        "create": trial.provider.create(trial.config),
        "upload": trial.provider.upload_bytes(handle, "/tmp/x", b""),
    }
    if error == "APITimeoutError":  # creation asks again
        calls.pop("create").close()
    for call, coroutine in calls.items():
        machine.failures[call] = kind(message)
        with pytest.raises((SandboxError, SandboxSetupError)) as raised:
            await coroutine
        assert raised.type is (OTHER if expected is LATE else expected)  # no command exceeded its time
    if expected is SETUP:
        assert trial.provider.setup_hint in str(found.value)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_missing_sdk_or_key_says_what_to_do(machine, monkeypatch, tmp_path, name, module):
    monkeypatch.setenv("HOME", str(tmp_path))
    for key in KEYS.values():
        monkeypatch.delenv(key)
    with pytest.raises(SandboxSetupError, match=KEYS[name]):
        get_provider(name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SandboxSetupError, match="pip install"):
        get_provider(name)


def test_daytona_takes_a_token_for_a_key(machine, monkeypatch):
    monkeypatch.delenv("DAYTONA_API_KEY", raising=False)
    monkeypatch.setenv("DAYTONA_JWT_TOKEN", "token")
    assert get_provider("daytona").name == "daytona"


def test_older_package_of_daytona_works(machine, monkeypatch):
    old = importlib.import_module("tests.fakes.sandbox_sdks.daytona")
    monkeypatch.setitem(sys.modules, "daytona", None)
    monkeypatch.setitem(sys.modules, "daytona_sdk", old)
    assert get_provider("daytona").sdk is old  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CLOUDS)
async def test_sandbox_gets_what_the_configuration_says(trial, machine, name, monkeypatch):
    monkeypatch.setenv("DEFAULT_DOCKER_IMAGE", "debian:13")
    variables: Any = {"A": 1}
    config = SandboxConfig(cpu=2, memory_mb=1500, timeout_seconds=90, environment_vars=variables, extra={"run": "r"})
    handle = await trial.provider.create(config)
    assert machine.boxes[handle.id].variables == {"A": "1"}
    settings = machine.boxes[handle.id].settings
    expected: dict[str, dict[str, object]] = {
        "prime": {"docker_image": "debian:13", "timeout_minutes": 2, "cpu_cores": 2, "memory_gb": 1500 / 1024},
        "modal": {"image": "debian:13", "timeout": 90, "cpu": 2, "memory": 1500, "app": "telescope"},
        "daytona": {"image": "debian:13", "ttl_minutes": 2, "auto_stop_interval": 2, "ephemeral": True},
        "e2b": {"template": None, "timeout": 90, "lifecycle": {"on_timeout": "kill"}},
    }
    assert expected[name].items() <= settings.items()
    assert machine.boxes[handle.id].labels == {"telescope_run": "r"}
    await trial.provider.bulk_destroy([handle])
    networked = await trial.provider.create(SandboxConfig(image="own", extra={"network": True}))
    assert machine.boxes[networked.id].network
    assert "own" in machine.boxes[networked.id].settings.values()
    trial.provider.destroy_sync(SandboxHandle(networked.id))


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["prime"])
async def test_options_of_prime(trial, machine, name):
    extra = {"team_id": "team", "start_command": "tail -f /dev/null"}
    handle = await trial.provider.create(SandboxConfig(extra=extra))
    settings: Any = machine.boxes[handle.id].settings
    assert settings["team_id"] == "team"
    assert settings["start_command"].args == ["-c", "tail -f /dev/null"]
    provider: Any = trial.provider
    job = await provider.start_background_job(handle, "echo done")
    assert (await provider.get_background_job(handle, job)).stdout == "done\n"
    await provider.destroy(handle)


@pytest.mark.parametrize("name", ["prime"])
async def test_create_is_asked_again_with_the_same_key(trial, machine, name):
    machine.failures["create"] = sys.modules["prime_sandboxes"].APITimeoutError("late")  # type: ignore[attr-defined]
    handle = await trial.provider.create(trial.config)
    assert machine.calls.count("create") == 2
    await trial.provider.destroy(handle)


@pytest.mark.parametrize("name", ["prime"])
async def test_sandbox_that_never_runs_is_destroyed(trial, machine, name):
    machine.failures["wait"] = sys.modules["prime_sandboxes"].SandboxImagePullError("no image")  # type: ignore[attr-defined]
    with pytest.raises(SandboxImagePullError):
        await trial.provider.create(trial.config)
    assert machine.num_created == 1 and not machine.boxes


@pytest.mark.parametrize("name", ["daytona"])
async def test_sandbox_of_a_late_create_is_destroyed(trial, machine, name):
    forgotten = await trial.provider.create(trial.config)
    error: Any = sys.modules["daytona"].DaytonaTimeoutError("late")  # type: ignore[attr-defined]
    error.sandbox_id, machine.failures["create"] = forgotten.id, error
    with pytest.raises(SandboxError, match="create: DaytonaTimeoutError: late"):
        await trial.provider.create(trial.config)
    assert not machine.boxes


@pytest.mark.parametrize("name", CLOUDS)
async def test_create_that_is_cancelled_twice_still_leaves_nothing(trial, machine, name):
    machine.create_seconds = 0.3
    creating = asyncio.ensure_future(trial.provider.create(trial.config))
    for _ in range(2):
        await asyncio.sleep(0.1)
        creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await asyncio.sleep(0.5)
    assert machine.num_created == 1 and not machine.boxes


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["prime", "e2b"])
async def test_long_command_is_started_then_asked_for(trial, machine, name, monkeypatch):
    monkeypatch.setattr(remote, "POLL_SECONDS", (0.1, 0.1))
    handle, run = await trial.shared(), trial.provider._run

    async def run_with_failures(handle: SandboxHandle, script: str, timeout: int) -> ExecResult:
        if machine.calls.count("execute") % 2:  # the first call starts the command; its polls fail from time to time
            machine.failures["execute"] = ConnectionError("reset")
        return await run(handle, script, timeout)

    monkeypatch.setattr(trial.provider, "_run", run_with_failures)
    seconds = type(trial.provider).detach_after + 1  # type: ignore[attr-defined]
    command = "echo out; sleep 2; echo error >&2; exit 5"
    result = await trial.provider.execute(handle, command, timeout=seconds)
    assert result == ExecResult(5, "out\n", "error\n")
    assert machine.calls.count("execute") > 2
    monkeypatch.setattr(type(trial.provider), "detach_after", 0.5)
    with pytest.raises(SandboxCommandTimeoutError):
        await trial.provider.execute(handle, "sleep 60", timeout=1)


@pytest.mark.parametrize("name", ["modal"])
@pytest.mark.parametrize(
    ("code", "expected"), [(-1, SandboxCommandTimeoutError), (137, SandboxOOMError), (1, SandboxError)]
)
async def test_script_that_is_ended_by_the_service_is_an_error(trial, name, code, expected, monkeypatch):
    async def run(*_: object) -> ExecResult:
        return ExecResult(code, "", "")

    handle = await trial.shared()
    monkeypatch.setattr(trial.provider, "_run", run)
    with pytest.raises(SandboxError) as found:
        await trial.provider.execute(handle, "true")
    assert found.type is expected


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["docker", "e2b"])
async def test_command_that_removes_its_files_has_an_exit_code_and_a_time_limit(trial, name):
    """The same as where it fills the disk."""
    handle, started = await trial.shared(), time.monotonic()
    result = await trial.provider.execute(handle, "rm -rf /tmp/.telescope*; exit 3")
    assert (result.exit_code, result.stdout) == (3, "")
    result = await trial.provider.execute(handle, "rm -rf /tmp/.telescope*; sleep 60", timeout=1)
    assert result.exit_code == 137 and time.monotonic() - started < 10


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["docker", "e2b"])
async def test_command_that_kills_by_name_kills_neither_its_runner_nor_its_time_limit(trial, name):
    mark = uuid.uuid4().hex
    result = await trial.provider.execute(await trial.shared(), f"pkill -f {mark}; echo not reached")
    assert (result.exit_code, result.stdout) == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize("name", ["e2b"])
async def test_full_disk_of_a_long_command_is_an_error_of_the_sandbox(trial, name, monkeypatch):
    async def run(_: SandboxHandle, script: str, timeout: int) -> ExecResult:
        if not (marks := re.findall(r"' (\w+) \$c", script)):
            return ExecResult(0, "", "")
        return ExecResult(0, f"output\n{marks[0]} \n", "")  # the file with the exit code is empty

    handle = await trial.shared()
    monkeypatch.setattr(remote, "POLL_SECONDS", (0.1, 0.1))
    monkeypatch.setattr(trial.provider, "_run", run)
    with pytest.raises(SandboxError, match="disk may be full"):
        await trial.provider.execute(handle, "true", timeout=100)


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["daytona", "docker"])
async def test_command_of_quotes_is_not_too_long_for_its_shell(trial, name):
    found = await trial.provider.execute(await trial.shared(), 'printf %s "' + "'" * 20_000 + '" | wc -c')
    assert found.stdout.strip() == "20000"


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["docker", "local"])
async def test_file_that_cannot_be_read_is_not_an_empty_one(trial, name):
    await trial.output("mkdir /tmp/folder; touch /tmp/locked; chmod 000 /tmp/locked")
    for path in ("/tmp/folder", "/tmp/locked", "/tmp/missing"):
        with pytest.raises(SandboxError, match=f"cannot read '{path}'"):
            await trial.provider.read_bytes(await trial.shared(), path)


def test_provider_that_cannot_be_made_keeps_its_key_to_itself():
    with pytest.raises(UserError, match="cannot be made with api_key: ") as found:
        get_provider("local", api_key="secret")
    assert "secret" not in str(found.value)


@pytest.mark.parametrize("name", ["docker"])
async def test_command_with_nul_is_refused(trial, name):
    with pytest.raises(UserError, match="NUL"):
        await trial.provider.execute(await trial.shared(), "echo \0")


@pytest.mark.parametrize("name", ["e2b"])
async def test_older_package_of_e2b_works(trial, machine, name, monkeypatch):
    async def create(template=None, timeout=None, metadata=None, envs=None, allow_internet_access=None, lifecycle=None,
                     **opts: str) -> Any:  # fmt: skip
        assert not opts
        return await newer(template, timeout, metadata, envs, allow_internet_access, lifecycle)

    newer = sys.modules["e2b"].AsyncSandbox.create
    monkeypatch.setattr(sys.modules["e2b"].AsyncSandbox, "create", create)
    await trial.provider.destroy(await trial.provider.create(trial.config))


@pytest.mark.parametrize("name", ["docker"])
@pytest.mark.parametrize(
    ("again", "expected"),
    [(ExecResult(1, "", "Error: no such container x"), GONE), (ExecResult(137, "", ""), SandboxOOMError), (None, None)],
)
async def test_killed_script_is_a_result_while_its_container_lives(trial, name, again, expected, monkeypatch):
    """`kill -9 -1` is a command like others; the end of a container is no lack of memory."""

    async def call(*arguments: str, **_: object) -> ExecResult:
        return ExecResult(137, "", "") if arguments[-1] != "true" else again or ExecResult(0, "", "")

    handle = await trial.shared()
    with monkeypatch.context() as patched:
        patched.setattr(trial.provider, "_call", call)
        if expected is None:
            assert await trial.provider.execute(handle, "kill -9 -1") == ExecResult(137, "", "")
        else:
            with pytest.raises(SandboxError) as found:
                await trial.provider.execute(handle, "kill -9 -1")
            assert found.type is expected


@pytest.mark.parametrize("name", ["modal"])
async def test_service_that_does_not_answer_is_no_slow_command(trial, name, monkeypatch):
    async def run(*_: object) -> None:
        await asyncio.sleep(60)

    handle = await trial.shared()
    monkeypatch.setattr(remote, "GRACE_SECONDS", 0)
    monkeypatch.setattr(trial.provider, "_run", run)
    with pytest.raises(SandboxError, match="of modal did not answer within 1 s") as found:
        await trial.provider.execute(handle, "true", timeout=0.5)
    assert found.type is SandboxError


@pytest.mark.parametrize("name", ["docker"])
@pytest.mark.parametrize("call", ["list", "destroy"])
async def test_service_that_hangs_holds_up_neither_start_nor_end_of_a_run(trial, name, call, monkeypatch):
    async def hang(*_: object) -> None:
        await asyncio.sleep(60)

    with monkeypatch.context() as patched:
        patched.setattr(remote, "CALL_SECONDS", 0.01)
        patched.setattr(trial.provider, "_checked", hang)
        calls = {"list": trial.provider.find, "destroy": trial.provider.destroy}
        with pytest.raises(SandboxError, match=f"docker: {call}: TimeoutError"):
            await asyncio.wait_for(calls[call](SandboxHandle("x")), 5)


@pytest.mark.parametrize("name", ["docker"])
async def test_container_is_locked_down(trial, docker, name):
    await trial.shared()
    line = " ".join(docker_calls(docker)[0])
    for option in (
        "--rm", "--network none", "--memory 2048m --memory-swap 2048m", "--cpus 1", "--pids-limit 1024", "--read-only",
        "--cap-drop ALL", "--security-opt no-new-privileges", "size=3072m", f"--label telescope_run={trial.run}",
    ):  # fmt: skip
        assert option in line
    assert "--entrypoint sh python:3.12-slim -c end=$(($(date +%s) + 900)); " in line
    other = await trial.provider.create(SandboxConfig(extra={"read_only": False, "network": True}))
    assert not {"--read-only", "none"} & set(docker_calls(docker)[-1])
    await trial.provider.destroy(other)


@pytest.mark.parametrize("name", ["docker"])
@pytest.mark.parametrize(("message", "expected"), [
    ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", SandboxSetupError),
    ("Cannot connect. Is the docker daemon running?\n\nRun 'docker run --help' for more", SandboxSetupError),
    ("permission denied while trying to connect to the docker API", SandboxSetupError),
    ("Unable to find image 'x:1' locally\npull access denied for x", SandboxImagePullError),
    ("Unable to find image 'x:1' locally\ndial tcp: lookup registry: no such host", SandboxImagePullError),
    ("Unable to find image 'x:1' locally\ntoomanyrequests: You have reached your pull rate limit", SandboxBusyError),
    ('Error: short-name "x" did not resolve to an alias', SandboxImagePullError),
    ("toomanyrequests: You have reached your pull rate limit", SandboxBusyError),
    ("something else", SandboxError),
])  # fmt: skip
async def test_failure_of_docker_becomes_ours(trial, docker, name, message, expected):
    (docker / "failure").write_text(message)
    with pytest.raises((SandboxError, SandboxSetupError)) as found:
        await trial.provider.create(trial.config)
    (docker / "failure").unlink()
    assert found.type is expected and "--help" not in str(found.value)


def test_missing_docker_says_how_to_install_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxSetupError, match=r"docs\.docker\.com"):
        get_provider("docker")
    with pytest.raises(SandboxSetupError, match="apt-get install podman"):
        get_provider("podman")


@pytest.mark.parametrize("path", json.loads(RECORDED.read_text()))
def test_fakes_take_what_the_sdks_take(path):
    recorded = json.loads(RECORDED.read_text())[path]
    module, _, name = path.partition(":")
    fake = parameters(f"tests.fakes.sandbox_sdks.{module.partition('.')[0]}:{name}")
    assert set(fake) <= {*recorded, "opts"}
    assert [known for known in recorded if known in fake and known != "opts"] == [x for x in fake if x != "opts"]
    try:
        importlib.import_module(module)
    except ImportError:
        return
    assert parameters(path) == recorded, "the SDK has changed: compare, then record anew (signatures.py)"
