"""The code environment in real sandboxes of this machine."""

import asyncio

import pytest

from telescope.environments.i3_code.own_problems import own_rows
from telescope.environments.registry import get_environment
from telescope.sandbox import SandboxError, SandboxNotRunningError

pytestmark = pytest.mark.slow


def score(*programs, **kwargs):
    """Returns the results of programs for problems by their index."""

    async def run():
        environment = get_environment("i3_code", dataset="own", pool_size=2, **kwargs)
        await environment.prepare_resources()
        try:
            calls = (
                environment.compute_reward(f"So:\n```python\n{program}\n```", environment.get_sample(index))
                for index, program in programs
            )
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await environment.close_resources()

    return asyncio.run(run())


def note(result, key):
    return next((turn["info_value"] for turn in result.info_turns if turn["info_key"] == key), "")


def test_every_reference_solution_passes_tests_of_its_problem():
    results = score(*((index, row["solution"]) for index, row in enumerate(own_rows())), max_num_tests=3)
    failed = [(index, note(result, "failed_tests")) for index, result in enumerate(results) if result.total_reward != 1]
    assert failed == []
    assert {result.sample_metrics["num_test_cases"] for result in results} == {3.0}


def test_wrong_slow_and_crashing_programs_are_told_apart():
    wrong, slow, crash, partly, missing = score(
        (0, "def multiples_sum(numbers): return 1"),
        (0, "import time\ndef multiples_sum(numbers): time.sleep(99)"),
        (30, "raise ValueError('no way')"),
        (30, "n = int(input())\nprint(9 if n == 4 else sum(x > 0 for x in map(int, input().split())))"),
        (0, ""),
        timeout_per_test=4.0,  # a busy machine starts Python in a second
        max_num_tests=3,
    )
    assert [result.total_reward for result in (wrong, slow, crash, partly, missing)] == [0.0] * 5
    assert slow.sample_metrics["num_timeouts"] == 3.0
    assert crash.sample_metrics["num_errors"] == 3.0
    assert "no way" in note(crash, "failed_tests")
    assert wrong.sample_metrics["num_errors"] == wrong.sample_metrics["num_timeouts"] == 0.0
    assert 0 < partly.sample_metrics["pass_rate"] < 1
    assert note(missing, "error") == "no ```python block"


@pytest.mark.parametrize(
    "trick",
    [
        "import os\nos._exit(0)",
        "import sys\nprint('0' * 32 + '[]')\nsys.exit(0)",
        "class All(list):\n    __eq__ = lambda a, b: True\ndef multiples_sum(n): return All()",
        "import glob\ndef multiples_sum(n): raise SystemExit(open(glob.glob('/tmp/*/job*')[0]).read())",
        "import os\nos.write(int(os.sys.argv[1]), b'0')\nos._exit(0)",
        "import os, signal\ndef multiples_sum(n): os.kill(os.getppid(), signal.SIGKILL)",
        "import os\ndef multiples_sum(n):\n    open(f'/proc/{os.getppid()}/fd/1', 'w').write('x')\n    return 0",
    ],
)
def test_a_program_that_does_not_compute_the_outputs_does_not_pass(trick):
    (result,) = score((0, trick))
    assert result.total_reward == 0.0
    assert "outputs" not in note(result, "failed_tests")


def test_a_program_that_stops_the_runner_fails_and_masks_nothing(monkeypatch):
    monkeypatch.setattr("telescope.environments.i3_code.environment.START_SECONDS", 1.0)
    trick = "import os, signal\ndef multiples_sum(n): os.kill(os.getppid(), signal.SIGSTOP)"
    (result,) = score((0, trick), timeout_per_test=1.0, max_num_tests=1)
    assert (result.total_reward, result.sample_metrics["sandbox_error"]) == (0.0, 0.0)


def test_a_failed_sandbox_is_replaced_once_and_then_masks_the_sample(monkeypatch):
    from telescope.sandbox.local import LocalSandboxProvider

    whole, fails = LocalSandboxProvider.execute, [1]

    async def execute(self, handle, command, timeout=60, working_dir=None):
        if fails[0] > 0 and "runner.py" in command:
            fails[0] -= 1
            raise SandboxNotRunningError("gone")
        return await whole(self, handle, command, timeout, working_dir)

    monkeypatch.setattr(LocalSandboxProvider, "execute", execute)
    solution = own_rows()[0]["solution"]
    (result,) = score((0, solution))
    metrics = result.sample_metrics
    assert (result.total_reward, metrics["retry_count"], metrics["sandbox_error"]) == (1, 1, 1)
    fails[0] = 2
    (error,) = score((0, solution))
    assert isinstance(error, SandboxError)
