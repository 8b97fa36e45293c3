"""What `context.run` starts ends with it, and its output is bounded."""

import asyncio
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from tests.integration.agents.test_faults import HI, Faulty
from tests.processes import has_ended

from telescope.environments.context import PROGRAM_VARIABLE, RolloutContext
from telescope.utils.child_guard import kill_by_variable

FORKS = "import os, time\nif os.fork() == 0:\n    {}time.sleep({})\n    os._exit(0)\nprint('done', flush=True)"


async def test_a_child_that_a_program_leaves_behind_ends_with_it(bench: Any) -> None:
    async def act(context: RolloutContext) -> str:
        await context.generate(HI)
        began = time.monotonic()
        done = await context.run([sys.executable, "-c", FORKS.format("", 60)])
        return f"{done.stdout.strip()} {time.monotonic() - began < 30}"

    sample = await (await bench(Faulty, lambda prompt: "Hello.", act=act)).run()
    assert sample.reward.sample_tags["saw"] == "done True"


async def test_the_agents_sdk_of_a_program_sends_no_traces(bench: Any) -> None:
    async def act(context: RolloutContext) -> str:
        await context.generate(HI)
        show = "import os; print(os.environ['OPENAI_AGENTS_DISABLE_TRACING'])"
        return (await context.run([sys.executable, "-c", show])).stdout.strip()

    sample = await (await bench(Faulty, lambda prompt: "Hello.", act=act)).run()
    assert sample.reward.sample_tags["saw"] == "1"


async def test_a_daemon_that_a_program_leaves_behind_ends_with_it(bench: Any) -> None:
    async def act(context: RolloutContext) -> str:
        await context.generate(HI)
        done = await context.run([sys.executable, "-c", FORKS.format("print(os.setsid(), os.getpid()); ", 60)])
        return done.stdout.split()[-1]

    sample = await (await bench(Faulty, lambda prompt: "Hello.", act=act)).run()
    daemon = int(sample.reward.sample_tags["saw"])
    assert await asyncio.to_thread(has_ended, daemon), "its process lives on"


async def test_a_program_has_the_marks_of_the_programs_around_it(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROGRAM_VARIABLE, "outer")

    async def act(context: RolloutContext) -> str:
        await context.generate(HI)
        return (await context.run(["printenv", PROGRAM_VARIABLE])).stdout

    marks = (await (await bench(Faulty, lambda prompt: "Hello.", act=act)).run()).reward.sample_tags["saw"]
    assert marks.split()[0] == "outer"
    assert len(marks.split()) == 2


def test_processes_are_killed_by_a_word_of_a_variable() -> None:
    with subprocess.Popen(["sleep", "60"], env={PROGRAM_VARIABLE: "outer inner"}) as program:
        kill_by_variable(PROGRAM_VARIABLE, "oute")
        assert program.poll() is None
        kill_by_variable(PROGRAM_VARIABLE, "outer")
        assert program.wait(30) == -signal.SIGKILL


async def test_a_daemon_with_its_own_environment_that_keeps_the_output_open_fails_the_rollout(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telescope.environments.context.OUTPUT_SECONDS", 0.5)
    leaves = FORKS.format("os.setsid(); os.execve('/bin/sleep', ['sleep', '8'], {}); ", 8)

    async def act(context: RolloutContext) -> str:
        return str(await context.run([sys.executable, "-c", leaves]))

    sample = await (await bench(Faulty, [], act=act)).run()
    assert sample.failure_kind == "environment"
    assert "with an environment of its own keeps its output open" in sample.failure_message


async def test_the_middle_of_a_long_output_of_a_program_is_left_out(bench: Any) -> None:
    code = "import sys; sys.stdin.read(); print('begin' + 'x' * 20_000_000 + 'end'); sys.exit('short')"

    async def act(context: RolloutContext) -> str:
        await context.generate(HI)
        done = await context.run([sys.executable, "-c", code], stdin="y" * 1_000_000)
        shown = done.stdout
        return (
            f"{len(shown) < 2**20 + 100} {shown[:5]} {shown[-4:-1]} {'bytes left out' in shown} {done.stderr.strip()}"
        )

    sample = await (await bench(Faulty, lambda prompt: "Hello.", act=act)).run()
    assert sample.reward.sample_tags["saw"] == "True begin end True short"
