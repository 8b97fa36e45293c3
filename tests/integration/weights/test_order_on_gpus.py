"""Which tests run on GPUs, and in which order: most are imported, and they share servers that one of them kills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FIRST = "test_before_any_sync"
LAST = ("test_a_worker_killed", "test_killing")

pytestmark = pytest.mark.slow


def test_tests_that_need_a_fresh_server_run_first_and_tests_that_kill_it_last() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    files = sorted(map(str, (ROOT / "tests" / "gpu" / "weights").glob("test_*_on_gpu.py")))
    listed = subprocess.run(
        [*command, "-o", "addopts=--import-mode=importlib", *files], cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert listed.returncode == 0, listed.stdout + listed.stderr
    tests = [line.split("::") for line in listed.stdout.splitlines() if "::" in line]
    num_servers = 0
    for position, (file, test) in enumerate(tests):
        name, _, parameters = test.removesuffix("]").partition("[")
        others = tests[position + 1 :] if name.startswith(LAST) else tests[:position] if name.startswith(FIRST) else []
        num_servers += name.startswith(LAST)
        # Its own parameters are those of the server alone, with which those of all tests begin.
        on_its_server = [other for where, other in others if where == file and f"[{parameters}" in other]
        assert on_its_server == [], f"{test} is in the wrong place"
    assert num_servers == 13


def test_the_parts_of_the_suite_leave_no_test_out() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "tests.integration.weights.collect_on_gpus"], cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    everything, *parts = json.loads(made.stdout).values()
    assert {part["code"] for part in (everything, *parts)} == {0}
    assert [test for part in parts for test in part["skipped"]] == []  # they have the GPUs that their tests ask for
    ran = [test for part in parts for test in part["run"]]
    assert sorted(ran) == sorted(everything["run"])
    assert len(ran) > 200
