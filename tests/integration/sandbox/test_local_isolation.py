"""Code in a local sandbox cannot reach, harm or exhaust what is outside of it."""

import argparse
import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.processes import wait_for

from telescope.cli.sandbox import run_shell
from telescope.environments.context import Answer, Call
from telescope.errors import UserError
from telescope.rollout.endpoint import Endpoint
from telescope.sandbox import (
    ExecResult,
    SandboxCommandTimeoutError,
    SandboxConfig,
    SandboxError,
    SandboxHandle,
    SandboxNotRunningError,
    SandboxSetupError,
    cgroups,
    get_provider,
    local,
)
from telescope.sandbox.base import MAX_OUTPUT_BYTES, run_sync
from telescope.sandbox.pool import ENDPOINT_INSIDE

pytestmark = pytest.mark.sandbox

SMALL = SandboxConfig(memory_mb=256, disk_size_gb=0.05)
Run = Callable[..., ExecResult]


@pytest.fixture(scope="module")
def provider():
    return get_provider("local")


@pytest.fixture(scope="module")
def box(provider) -> Iterator[SandboxHandle]:
    handle = run_sync(provider.create(SMALL))
    yield handle
    run_sync(provider.destroy(handle))


@pytest.fixture
def run(provider, box: SandboxHandle) -> Run:
    return lambda command, timeout=30, **options: run_sync(provider.execute(box, command, timeout, **options))


def python(code: str) -> str:
    return f"python3 - <<'CODE'\n{code}\nCODE"


def test_a_fork_bomb_stays_within_the_limit_of_processes(provider, box, run: Run):
    with pytest.raises(SandboxCommandTimeoutError):
        run("bomb() { bomb | bomb & }; bomb; sleep 60", timeout=2)
    assert int(run("ls -d /proc/[0-9]* | wc -l").stdout) < 50  # the time limit ended the whole tree


def test_memory_is_bounded_by_the_sandbox_not_by_the_machine(run: Run):
    before = psutil.virtual_memory().available
    result = run(python("pieces = []\nwhile True: pieces.append(b'x' * 2**24)"))
    assert result.exit_code in (1, 137)
    assert before - psutil.virtual_memory().available < 2**30
    assert run("echo alive").stdout == "alive\n"


@pytest.mark.parametrize("folder", ["/", "/tmp", "/workspace", "/dev/shm", "/run", "/etc"])
def test_the_writable_disk_has_a_size(run: Run, folder: str):
    result = run(f"head -c 200000000 /dev/zero > {folder}/big; stat -c %s {folder}/big; rm {folder}/big")
    assert "No space left" in result.stderr
    assert int(result.stdout) < 0.06 * 2**30


@pytest.mark.parametrize(
    "path",
    [
        "/usr/x", "/usr/bin/x", "/bin/x", "/dev/x", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname",
        "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger", "/proc/irq/0/smp_affinity", "/sys/x",
    ],
)  # fmt: skip
def test_nothing_of_the_host_is_writable(run: Run, path: str):
    before = Path(path).read_bytes() if os.access(path, os.R_OK) and Path(path).is_file() else None
    assert run(f": >> {path}").exit_code != 0  # which writes nothing if it is allowed
    assert before is None or Path(path).read_bytes() == before


def test_nothing_outside_processes_is_writable_in_proc(run: Run):
    found = run("find /proc -path '/proc/[0-9]*' -prune -o -type f -writable -print 2> /dev/null")
    assert found.stdout == ""


def test_neither_the_network_nor_the_loopback_of_the_host_is_there(run: Run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = "import socket\nfor place in (('127.0.0.1', %d), ('8.8.8.8', 53)):\n"
        code += "    try: socket.create_connection(place, 2); print('open')\n    except OSError: print('closed')"
        assert run(python(code % port)).stdout == "closed\nclosed\n"


def test_processes_of_the_host_cannot_be_seen_traced_or_killed(run: Run):
    victim = subprocess.Popen(["sleep", "60"])
    try:
        code = f"import ctypes, os\nprint(os.path.exists('/proc/{victim.pid}'))\n"
        code += f"print(ctypes.CDLL(None).ptrace(16, {victim.pid}, 0, 0))"
        assert run(python(code)).stdout == "False\n-1\n"
        assert run(f"kill -9 {victim.pid}").exit_code != 0
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_killing_everything_does_not_end_the_sandbox(run: Run):
    assert run("kill -9 1; kill -9 -1; echo on").stdout == "on\n"
    assert run("setsid kill -9 -1 & wait; setsid bash -c 'kill -9 -1' & sleep 20").exit_code == 137


def test_orphans_leave_no_zombies(run: Run):
    run("for n in $(seq 50); do (true &); done")
    run("true")
    assert "Z" not in run("cat /proc/[0-9]*/stat | cut -d' ' -f3").stdout


def test_uploads_and_downloads_follow_links_only_inside(provider, box, run: Run, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("outside")
    run(f"mkdir -p {tmp_path}; ln -s {secret} /workspace/link; ln -s /etc /workspace/folder")
    run_sync(provider.upload_bytes(box, "/workspace/link", b"inside"))
    run_sync(provider.upload_bytes(box, "/workspace/folder/../../escaped", b"inside"))
    assert secret.read_text() == "outside" and not Path("/escaped").exists()
    assert run_sync(provider.read_bytes(box, "/workspace/link")) == b"inside"


def test_an_archive_that_climbs_out_stays_inside(run: Run, tmp_path: Path):
    code = "import io, tarfile\nwith tarfile.open('/tmp/a.tar', 'w') as tar:\n"
    code += "    info = tarfile.TarInfo('../../../../tmp/telescope-escaped'); info.size = 1\n"
    code += "    tar.addfile(info, io.BytesIO(b'x'))"
    assert run(python(code)).exit_code == 0
    assert run("cd /workspace && tar -xPf /tmp/a.tar && ls /tmp/telescope-escaped").exit_code == 0
    assert not Path("/tmp/telescope-escaped").exists()


def test_a_named_pipe_blocks_neither_upload_nor_download(provider, box, run: Run):
    run("mkfifo /workspace/pipe")
    with pytest.raises(SandboxError, match="cannot write '/workspace/pipe'"):
        run_sync(provider.upload_bytes(box, "/workspace/pipe", b"x"))
    assert run_sync(provider.read_bytes(box, "/workspace/pipe")) == b""


def test_reading_a_folder_leaves_no_descriptor_open(provider, box, run: Run):
    count = "ls /proc/1/fd | wc -l"
    before = run(count).stdout
    with pytest.raises(SandboxError, match="Is a directory"):
        run_sync(provider.read_bytes(box, "/tmp"))
    assert run(count).stdout == before


def test_a_flood_of_output_costs_the_host_little_memory(run: Run):
    run("true")
    before = psutil.Process().memory_info().rss
    result = run("head -c 200000000 /dev/zero | tr '\\0' x; head -c 200000000 /dev/zero >&2", timeout=60)
    assert psutil.Process().memory_info().rss - before < 32 * 2**20
    assert "bytes left out" in result.stdout and len(result.stdout) < MAX_OUTPUT_BYTES + 100
    assert len(result.stderr) < MAX_OUTPUT_BYTES + 100


def test_a_background_process_may_write_without_end(run: Run):
    """Its output is read and dropped, and commands are answered in time."""
    assert run("yes & sleep 0.5; echo started >&2").stderr == "started\n"
    assert run("echo after", timeout=5).stdout == "after\n"
    run("pkill yes")


def test_the_server_runs_by_the_python_of_its_bytecode(run: Run):
    """`python3` of the same folder may be another one, as on Ubuntu 22.04 with its package python3.11."""
    program = run("head -zn 1 /proc/1/cmdline").stdout
    assert program.rstrip("\0").endswith(f"/bin/python{sys.version_info[0]}.{sys.version_info[1]}")


def test_python_may_be_named_by_a_link(tmp_path: Path):
    """As uv names those that it installs."""
    (tmp_path / "link").symlink_to(sys.base_prefix)
    subprocess.run([tmp_path / "link/bin/python3", "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    script = """if True:
        import sys
        from telescope.sandbox import SandboxConfig, get_provider
        from telescope.sandbox.base import run_sync
        provider = get_provider("local")
        handle = run_sync(provider.create(SandboxConfig()))
        print(sys.base_prefix, run_sync(provider.execute(handle, "python3 -c 'print(1)'")).stdout)"""
    variables = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", script], env=variables, text=True, stdout=subprocess.PIPE
    )
    assert done.stdout == f"{tmp_path}/link 1\n\n"


def test_no_program_gives_more_rights(run: Run):
    status = run("cat /proc/self/status").stdout
    assert "NoNewPrivs:\t1" in status
    assert all(f"{kind}:\t0000000000000000" in status for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
    assert run("cp /bin/sh /tmp/sh && chmod u+s /tmp/sh && /tmp/sh -p -c 'id -u'").stdout == "1000\n"
    commands = "mount -t tmpfs none /mnt, unshare -U true, unshare -r true, chroot / true, date -s 2000-01-01"
    for command in commands.split(", "):
        assert run(command).exit_code != 0, command


def test_there_are_no_devices_but_harmless_ones(run: Run):
    assert run("mknod /tmp/sda b 8 0").exit_code != 0
    harmless = "console core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
    assert set(run("ls /dev").stdout.split()) <= set(harmless.split())


def test_secrets_of_the_run_and_of_other_sandboxes_are_out_of_reach(
    provider, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    (tmp_path / "secret").write_text("very-secret")
    other = run_sync(provider.create(SandboxConfig(memory_mb=256, disk_size_gb=0.05, environment_vars={"MINE": "1"})))
    run_sync(provider.upload_bytes(other, "/workspace/mine", b"mine"))
    try:
        assert "very-secret" not in run_sync(provider.execute(other, "env; cat /proc/*/environ")).stdout
        assert run_sync(provider.execute(other, f"cat {tmp_path}/secret")).exit_code != 0
        assert run("ls /workspace/mine").exit_code != 0
        assert run("ls ~root/.ssh /home /root/.netrc").stdout.strip() in ("", "/home:")
        assert run("test -e /etc/ssl/private").exit_code == 1  # root's sandboxes may have root's rights to files
    finally:
        run_sync(provider.destroy(other))


def processes_with(word: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if word in " ".join(p.info["cmdline"] or ())]


def test_daemons_end_with_the_sandbox(provider):
    handle = run_sync(provider.create(SMALL))
    run_sync(provider.execute(handle, "setsid nohup sleep 98761 > /dev/null 2>&1 & (sleep 98761 &) ; sleep 0.1"))
    assert len(processes_with("sleep 98761")) >= 2
    run_sync(provider.destroy(handle))
    wait_for(lambda: not processes_with("sleep 98761"), "its end")
    with pytest.raises(SandboxNotRunningError):
        run_sync(provider.execute(handle, "true"))


def test_a_time_limit_kills_those_that_left_the_session(run: Run):
    with pytest.raises(SandboxCommandTimeoutError, match=r"did not end within 0\.5 s"):
        run("setsid sleep 98762 & (setsid sleep 98762 &); sleep 98762", timeout=0.5)
    wait_for(lambda: not processes_with("sleep 98762"), "its end")


def test_a_time_limit_kills_those_that_hide(run: Run):
    hide = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print(98764); time.sleep(60)"
    for command in (f"exec python3 -c '{hide}'", f"python3 -c '{hide}'", "(env -i setsid sleep 98764 &); sleep 60"):
        with pytest.raises(SandboxCommandTimeoutError):
            run(command, timeout=0.5)
    wait_for(lambda: not processes_with("98764"), "its end")


@pytest.mark.parametrize("timeout", [1e7, 1e300, float("inf")])
def test_a_time_limit_may_be_as_good_as_none(run: Run, timeout: float):
    assert run("echo done", timeout=timeout).stdout == "done\n"


def test_a_cancelled_creation_or_end_leaves_nothing(provider):
    async def create_and_cancel(seconds: float) -> None:
        creating = asyncio.ensure_future(provider.create(SMALL))
        await asyncio.sleep(seconds)
        creating.cancel()
        await asyncio.sleep(seconds / 8)
        creating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await provider.destroy(await creating)

    async def many() -> None:
        for _ in range(4):
            await asyncio.gather(*(create_and_cancel(0.01 * number) for number in range(12)))

    def left() -> list[Path | str]:
        mine = f"local-{os.getpid()}-"
        marks = [b for p in Path("/proc").glob("[0-9]*/environ") if (b := marks_of(p)).startswith(mine)]
        return [*Path("/sys/fs/cgroup").glob(f"*/telescope/{mine}*"), *marks]

    before = left()
    run_sync(many())
    wait_for(lambda: not set(left()) - set(before), "the end of what is left")


def marks_of(environ: Path) -> str:
    with contextlib.suppress(OSError):
        return environ.read_text(errors="replace").partition("TELESCOPE_SANDBOX=")[2].partition("\0")[0]
    return ""


def test_providers_that_are_made_at_once_do_not_disturb_each_other():
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: cgroups.are_usable(), range(24)))
    assert len(set(made)) == 1


def test_a_closed_provider_answers_with_an_error():
    provider = get_provider()
    handle = run_sync(provider.create(SMALL))
    for _ in range(2):
        run_sync(provider.close())
    for call in (provider.create(SMALL), provider.execute(handle, "true")):
        with pytest.raises(SandboxNotRunningError, match=r"closed|has ended"):
            run_sync(call)
    run_sync(provider.destroy(handle))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpu_count": 1}, "no GPU"),
        ({"memory_mb": 10**9}, r"memory_mb=1000000000 of a local sandbox is above this machine's \d+"),
        ({"extra": {"network": True}}, "no network"),
        ({"extra": {"read_only": "/nowhere/folder"}}, "'/nowhere/folder'"),
        ({"extra": {"read_only": ["src"]}}, "'src'"),
        ({"extra": {"read_only": True}}, "read_only, in extra of a local sandbox, is True: set a path"),
        ({"extra": {"max_processes": 0}}, "max_processes, in extra of a local sandbox, is 0: set a number"),
        ({"extra": {"endpoint": "/nowhere/socket"}}, "'/nowhere/socket'"),
    ],
)
def test_what_a_local_sandbox_cannot_have_is_refused(provider, values: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        run_sync(provider.create(SandboxConfig(**{"memory_mb": 256, "disk_size_gb": 0.05, **values})))


def test_the_shell_keeps_its_folder_whatever_is_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lines = ["ls /nope; exit 2", "if", "echo a\0b", "pwd", "mkdir d; cd d; rmdir ../d", "pwd", "cd /tmp", "pwd"]
    lines += ["exit 3", "echo after the end"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert run_sync(run_shell(argparse.Namespace(provider="local", image="", memory_mb=256))) == 3
    shown = capsys.readouterr()
    assert shown.out == "/workspace\n/workspace\n/tmp\n"
    assert "cannot access '/nope'" in shown.err and "NUL" in shown.err


@pytest.mark.parametrize(
    "last", ["", "for task in tasks: task.cancel()\n    await asyncio.wait(tasks)\n    await provider.close()"]
)
def test_a_loop_that_ends_during_creations_leaves_no_tasks(last: str):
    code = (
        "import asyncio\n"
        "from telescope.sandbox import SandboxConfig, get_provider\n"
        "async def main():\n"
        "    provider = get_provider()\n"
        "    config = SandboxConfig(memory_mb=256, disk_size_gb=0.05)\n"
        "    tasks = [asyncio.ensure_future(provider.create(config)) for _ in range(4)]\n"
        "    await asyncio.sleep(0.02)\n"
        f"    {last}\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "asyncio" not in ended.stderr and "Task" not in ended.stderr, ended.stderr


def test_a_killed_host_process_leaves_nothing(tmp_path: Path):
    code = (
        "import asyncio, time\n"
        "from telescope.sandbox import SandboxConfig, get_provider\n"
        "async def main():\n"
        "    provider = get_provider()\n"
        "    for _ in range(3):\n"
        "        handle = await provider.create(SandboxConfig(memory_mb=256, disk_size_gb=0.05))\n"
        "        await provider.execute(handle, 'setsid sleep 98763 & sleep 0.1')\n"
        "    print('ready', flush=True)\n"
        "    await provider.execute(handle, 'sleep 98763', timeout=1000)\n"
        "asyncio.run(main())\n"
    )
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None and host.stdout.readline() == "ready\n"
    assert len(processes_with("sleep 98763")) >= 4
    host.send_signal(signal.SIGKILL)
    host.wait()
    wait_for(lambda: not processes_with("sleep 98763"), "its end")

    def has_no_cgroup() -> bool:
        get_provider()  # removes the cgroups of processes that have ended
        return not list(Path("/sys/fs/cgroup").glob(f"**/telescope/local-{host.pid}-*"))

    wait_for(has_no_cgroup, "the removal of its cgroups")  # the kernel frees them a moment after their processes


async def test_an_agent_inside_reaches_the_endpoint_of_its_rollout(provider, tmp_path: Path):
    """The endpoint listens on a Unix socket; clients inside use the loopback as usual, and have no other network."""

    async def complete(call: Call) -> Answer:
        return Answer(f"{call.chat} read {call.messages[0]['content']}", id="1")

    async def count(call: Call) -> int:
        return len(call.messages)

    path = tmp_path / "endpoint.sock"
    server = Endpoint(["policy"])
    await server.start(path)
    request = {
        "url": f"{ENDPOINT_INSIDE}/chat/worker/v1/chat/completions",
        "headers": {"x-api-key": server.open(complete, count)},
        "data": json.dumps({"messages": [{"role": "user", "content": "this"}]}).encode(),
    }
    handle = await provider.create(SandboxConfig(memory_mb=256, disk_size_gb=0.05, extra={"endpoint": str(path)}))
    try:
        with pytest.raises(SandboxCommandTimeoutError):  # kills only what the command started
            await provider.execute(handle, "sleep 20", 0.2)
        code = f"from urllib.request import *\nprint(urlopen(Request(**{request!r}), timeout=10).read().decode())"
        assert '"content":"worker read this"' in (await provider.execute(handle, python(code))).stdout
    finally:
        await provider.destroy(handle)
        await server.stop()


def test_a_sandbox_with_an_endpoint_keeps_the_user_that_may_enter_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Root's other sandboxes run as another user, if every user may enter the folders that they mount."""
    monkeypatch.setattr(local, "_is_open_to_all", lambda path: path != tmp_path)
    monkeypatch.setattr(local.os, "geteuid", lambda: 0)
    (tmp_path / "endpoint").touch()
    provider = local.LocalSandboxProvider()
    with_endpoint = replace(SMALL, extra={"endpoint": str(tmp_path / "endpoint")})
    users = [provider._command(config, 2**20)[1] for config in (SMALL, with_endpoint)]
    assert users == [local.UNPRIVILEGED_USER, None]


def test_a_sandbox_ends_when_its_time_is_over(provider):
    handle = run_sync(provider.create(SandboxConfig(memory_mb=256, disk_size_gb=0.05, timeout_seconds=0.5)))
    with pytest.raises(SandboxNotRunningError, match="its time is over"):
        run_sync(provider.execute(handle, "sleep 20"))
    assert not run_sync(provider.is_alive(handle))
    run_sync(provider.destroy(handle))


def test_without_cgroups_each_process_is_limited_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    provider = get_provider()
    handle = run_sync(provider.create(SMALL))
    try:
        assert run_sync(provider.execute(handle, python("b'x' * 10**9"))).exit_code == 1
        assert run_sync(provider.execute(handle, "ulimit -u")).stdout == "256\n"
        assert "these limits are soft: memory (of each process, not of all)" in caplog.text
    finally:
        run_sync(provider.destroy(handle))


def test_without_bubblewrap_nothing_runs_and_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxSetupError, match="apt-get install bubblewrap"):
        get_provider()


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("Unknown option --disable-userns", r"Unknown option --disable-userns\. It needs bubblewrap 0\.8 or newer"),
        ("No permissions to create new namespace", r"No permissions to create new namespace(.|\n)*AppArmor"),
    ],
)
def test_the_error_of_a_bubblewrap_that_fails_is_shown_with_advice_where_it_fits(
    tmp_path: Path, error: str, shown: str
):
    broken = tmp_path / "bwrap"
    broken.write_text(f"#!/bin/sh\necho 'bwrap: {error}' >&2\nexit 1\n")
    broken.chmod(0o755)
    provider = get_provider("local", bwrap=str(broken))
    with pytest.raises(SandboxSetupError, match=shown):
        run_sync(provider.create(SMALL))


def test_a_cancelled_command_is_killed(provider, box: SandboxHandle, run: Run):
    async def cancel() -> None:
        executing = asyncio.ensure_future(provider.execute(box, "touch /tmp/began; sleep 98764"))
        await provider.execute(box, "until [ -e /tmp/began ]; do sleep 0.01; done")
        executing.cancel()

    run_sync(cancel())
    wait_for(lambda: not processes_with("sleep 98764"), "its end")
    assert run("echo alive").stdout == "alive\n"


FORK_BOMB = """
import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(98)
    except OSError:
        time.sleep(0.01)
"""


def test_the_limit_of_processes_is_an_option_and_a_command_beyond_it_fails(provider):
    handle = run_sync(provider.create(replace(SMALL, extra={"max_processes": 9})))
    try:
        run_sync(provider.execute(handle, f"python3 -c '{FORK_BOMB}' > /dev/null 2>&1 &"))
        deadline = time.monotonic() + 30
        while (beyond := run_sync(provider.execute(handle, "true"))).exit_code == 0:
            assert time.monotonic() < deadline, "the limit was never reached"
        assert (beyond.exit_code, "limit of processes" in beyond.stderr) == (126, True)
    finally:
        run_sync(provider.destroy(handle))


def test_limits_go_to_the_delegated_cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for file in ("cgroup.controllers", "cgroup.procs"):
        (tmp_path / file).touch()
    monkeypatch.setenv(cgroups.FOLDER_VARIABLE, str(tmp_path))
    cgroup = cgroups.Cgroup("local-1-x", memory_bytes=2**20, num_processes=9, cpu=0.5)
    made = tmp_path / "telescope" / "local-1-x"
    assert cgroup.folders == [made]
    values = {file: (made / file).read_text() for file in ("memory.max", "pids.max", "cpu.max", "memory.swap.max")}
    assert values == {"memory.max": "1048576", "pids.max": "9", "cpu.max": "50000 100000", "memory.swap.max": "0"}


def test_a_controller_that_is_not_delegated_keeps_no_other_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for file in ("cgroup.controllers", "cgroup.procs"):
        (tmp_path / file).touch()
    written: list[str] = []

    def write(path: Path, text: str) -> None:
        if path.name == "cgroup.subtree_control" and "cpu" in text:
            raise FileNotFoundError(path)
        written.append(f"{path.parent.relative_to(tmp_path)} {text}")

    monkeypatch.setenv(cgroups.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(Path, "write_text", write)
    cgroups.Cgroup("local-1-x", memory_bytes=2**20, num_processes=9, cpu=0.5)
    assert written[:4] == [". +memory", ". +pids", "telescope +memory", "telescope +pids"]


def test_a_sandbox_may_not_swap_with_cgroups_of_version_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Else it could use far more memory than its limit, and slow down the machine."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "cgroup.procs").touch()
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    cgroup = cgroups.Cgroup("local-1-x", memory_bytes=2**24, num_processes=9, cpu=1)
    limits = [(cgroup.folders[0] / f"memory.{kind}limit_in_bytes").read_text() for kind in ("", "memsw.")]
    assert limits == [f"{2**24}", f"{2**24}"]
