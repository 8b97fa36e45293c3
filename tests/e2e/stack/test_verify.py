"""`telescope verify`: all checks pass on a real engine and trainer, and a fault fails its own check."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.stack.conftest import Stack

from telescope.orchestrator.run_components import RunComponents
from telescope.orchestrator.status import RunStatus
from telescope.verify.checks import Check
from telescope.verify.run import run_checks

pytestmark = pytest.mark.e2e

in_session_loop = pytest.mark.asyncio(loop_scope="session")


async def run_all_checks(stack: Stack, parts: RunComponents) -> dict[str, Check]:
    await stack.parts.trainer.restart()
    checks: list[Check] = []
    await run_checks(parts, RunStatus("e2e", 0), checks.append)
    return {check.name: check for check in checks}


@in_session_loop
async def test_every_check_passes_on_a_healthy_run(stack: Stack) -> None:
    config = stack.parts.config.replace(top_p=0.9)
    checks = await run_all_checks(stack, dataclasses.replace(stack.parts, config=config))
    assert [str(check) for check in checks.values() if not check.ok] == []
    assert len(checks) == 8
    values = {name: check.values for name, check in checks.items()}
    assert values["engine and trainer logprobs agree (temperature 1)"]["max"] <= 1e-4
    assert values["packed and single samples have equal logprobs"]["max"] <= 1e-4
    assert values["the gradient does not depend on packing"]["relative_error"] <= 1e-5
    assert values["a tensor with one wrong bit is detected"]["detected_on"] == [0]


@in_session_loop
async def test_a_trainer_without_temperature_fails_only_parity_and_the_first_step(stack: Stack) -> None:
    """The engine samples at 0.7, the trainer computes at 1: a fault that shows as a wrong KL in every step."""
    sampling = dataclasses.replace(stack.parts.settings.sampling, temperature=0.7)
    settings = dataclasses.replace(stack.parts.settings, sampling=sampling)
    checks = await run_all_checks(stack, dataclasses.replace(stack.parts, settings=settings))
    failed = {name for name, check in checks.items() if not check.ok}
    assert failed == {
        "engine and trainer logprobs agree (temperature 1)", "the first training step is on-policy",
    }  # fmt: skip
    assert len(checks) == 7


@pytest.mark.slow
def test_the_command_passes_all_checks_and_exits_with_0(tmp_path: Path) -> None:
    target = tmp_path / "verify.json"
    command = [sys.executable, "-m", "telescope", "verify", f"--json={target}", "--inference_base_port=18640"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "all 8 checks hold" in finished.stdout
    report = json.loads(target.read_text())
    assert report["ok"]
    by_name = {check["name"]: check["values"] for check in report["checks"]}
    assert by_name["engine and trainer logprobs agree (temperature 0.7)"]["max"] <= 1e-4
    assert by_name["packed and single samples have equal logprobs"]["max"] <= 1e-4
    assert by_name["the gradient does not depend on packing"]["relative_error"] <= 1e-5
    assert by_name["a tensor with one wrong bit is detected"]["detected_on"] == [0]
    assert not list(tmp_path.glob("runs*")), "nothing is kept"
