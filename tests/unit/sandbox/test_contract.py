"""Every provider holds the contract, and the contract notices a provider that does not."""

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.sandbox_sdks.machine import Machine

from telescope.cli import doctor
from telescope.sandbox import ExecResult, SandboxHandle, SandboxNotRunningError, contract
from telescope.sandbox.contract import CHECKS, ContractError, Trial
from telescope.sandbox.modal import ModalSandboxProvider

pytestmark = pytest.mark.sandbox


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["local", "prime", "modal", "daytona", "e2b", "docker"])
async def test_provider_holds(trial, check, name):
    await check(trial)


class BadProvider(ModalSandboxProvider):
    """Forgets exit codes, keeps sandboxes, ignores deadlines, and reports ended ones as running."""

    async def execute(self, handle: SandboxHandle, command: str, *args: Any, **kwargs: Any) -> ExecResult:
        return ExecResult(0, "", "")

    async def upload_bytes(self, handle: SandboxHandle, remote_path: str, content: bytes) -> None:
        return None

    async def destroy(self, handle: SandboxHandle) -> None:
        raise SandboxNotRunningError("gone")


@pytest.fixture
def bad(machine: Machine) -> Trial:
    return Trial(BadProvider())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_check_fails_for_a_bad_provider(bad, check):
    with pytest.raises((ContractError, SandboxNotRunningError)):
        await check(bad)


async def broken(trial: Trial) -> None:
    """Nothing holds."""
    raise ContractError("as promised")


async def test_a_trial_that_is_interrupted_leaves_nothing(machine):
    trial = Trial(ModalSandboxProvider())
    await trial.shared()
    await trial.provider.create(replace(trial.config, extra={"run": f"{trial.run}-label"}))
    await trial.close()
    assert not machine.boxes


@pytest.mark.parametrize(("checks", "status"), [((contract.environment,), 0), ((contract.environment, broken), 1)])
def test_doctor_prints_each_check_with_its_time(machine, checks, status, monkeypatch, capsys):
    monkeypatch.setattr(contract, "CHECKS", checks)
    assert doctor.run(doctor.build_parser().parse_args(["--sandbox", "modal"])) == status
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"ok +\d+\.\d\d s  Variables of the configuration are set", lines[0])
    assert any(line == "-> as promised" for line in lines) == (status == 1)
    assert not machine.boxes
