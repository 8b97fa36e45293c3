"""A process that has loaded Ray ends with the code of its command, whatever native code does at the very end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import telescope

SOURCES = Path(telescope.__file__).parent.parent
NATIVE_CRASH = """
import ctypes
libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)
"""
"""Aborts the process in the phase in which native code cleans up, as a native thread may."""


def run(command: str, *, before: str = NATIVE_CRASH, with_ray: bool = True) -> subprocess.CompletedProcess[str]:
    ray = "import types\nsys.modules['ray'] = types.ModuleType('ray')\n" if with_ray else ""
    script = f"""
import atexit, sys, threading, time
from telescope.utils.process import run_and_exit
{ray}
{before}
def command():
    atexit.register(print, "cleaned up")
    threading.Thread(target=lambda: (time.sleep(0.2), print("joined"))).start()
    {command}
run_and_exit(command)
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def test_the_exit_code_is_that_of_the_command_and_python_cleans_up_first():
    ended = run("return 3")
    assert (ended.returncode, ended.stdout) == (3, "joined\ncleaned up\n")


def test_an_unexpected_exception_ends_with_1_and_its_traceback():
    ended = run("raise RuntimeError('unexpected')")
    assert ended.returncode == 1
    assert "RuntimeError: unexpected" in ended.stderr
    assert "cleaned up" in ended.stdout


def test_a_command_without_ray_ends_as_any_python_program():
    assert run("return 3", with_ray=False).returncode == -6, "the crash of this test is one"
    assert run("return 3", before="", with_ray=False).returncode == 3


def test_a_closed_output_pipe_does_not_change_the_code():
    assert run("sys.stderr.close(); return 0").returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_command_that_is_ended_by_a_signal_removes_its_temporary_files(number, code):
    script = """
import tempfile, time
from telescope.utils.process import run_and_exit
def command():
    with tempfile.TemporaryDirectory() as folder:
        print(folder, flush=True)
        time.sleep(60)
run_and_exit(command)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        folder = Path(process.stdout.readline().strip())
        process.send_signal(number)
        assert process.wait(timeout=60) == code
    assert not folder.exists()


@pytest.mark.parametrize(
    "started",
    [
        "await asyncio.gather(within(60, without_exit(rollout())))",
        "await asyncio.gather(rollout(), return_exceptions=True)",
        "kept = asyncio.create_task(rollout()); await asyncio.sleep(60)",
        "loop.call_soon(block); await asyncio.sleep(60)",
        "load_function('blocking:function', 'the reward')",
    ],
)
def test_a_signal_ends_a_command_whose_user_code_blocks_the_event_loop(tmp_path, started):
    (tmp_path / "blocking.py").write_text("import __main__\n__main__.block()")
    script = f"""
import asyncio, time
from telescope.environments.user_code import contain_exits, load_function, within, without_exit
from telescope.utils.process import run_and_exit
def block():
    print("blocked", flush=True)
    time.sleep(60)
async def rollout():
    block()
async def check():
    loop = asyncio.get_running_loop()
    contain_exits(loop)
    try:
        {started}
    except Exception as error:
        print(error)
run_and_exit(lambda: asyncio.run(check()))
"""
    command, environ = [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCES}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as process:
        assert process.stdout.readline() == "blocked\n"
        process.send_signal(signal.SIGTERM)
        assert "RuntimeError: " not in process.stdout.read()
        assert process.wait(timeout=60) == 143


def test_a_signal_ends_a_forked_child_of_a_command_silently():
    script = """
import multiprocessing, time
from telescope.utils.process import run_and_exit
def command():
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=lambda: (ready.set(), time.sleep(60)))
    child.start()
    ready.wait()
    child.terminate()
    child.join()
    return abs(child.exitcode)
run_and_exit(command)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=40)
    assert (ended.returncode, ended.stderr) == (143, "")


INTERRUPTED_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the process of the tests does with it
class Interrupting:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from telescope.cli.main import command
command(["ui", "--port", "0", "--root", sys.argv[2]])
"""


@pytest.mark.parametrize("module", ["telescope.utils.process", "telescope.cli.ui", "pyarrow.lib", "uvicorn", "duckdb"])
def test_ctrl_c_ends_a_command_without_a_traceback_while_it_imports(tmp_path, module):
    arguments = [sys.executable, "-c", INTERRUPTED_IMPORT, module, str(tmp_path)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=40)  # before the limit of a unit test
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
