"""Every provider holds the contract, and the contract notices a provider that does not."""

from typing import Any

import pytest

from telescope.sandbox import ExecResult, SandboxHandle, SandboxNotRunningError, contract
from telescope.sandbox.contract import CHECKS, Check, ContractError, Trial, run_contract
from telescope.sandbox.modal import ModalSandboxProvider

pytestmark = pytest.mark.sandbox


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["local", "prime", "modal", "daytona", "e2b", "docker"])
async def test_provider_holds(trial: Trial, check: Check, name: str) -> None:
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
def bad(machine: Any) -> Trial:
    return Trial(BadProvider())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_check_fails_for_a_bad_provider(bad: Trial, check: Check) -> None:
    with pytest.raises((ContractError, SandboxNotRunningError)):
        await check(bad)


@pytest.mark.parametrize("name", ["modal"])
async def test_contract_reports_each_check_once(trial: Trial, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(trial: Trial) -> None:
        """Nothing holds."""
        raise ContractError("as promised")

    monkeypatch.setattr(contract, "CHECKS", (contract.environment, broken))
    results = [(check.__name__, problem) async for check, _, problem in run_contract(trial)]
    assert results == [("environment", ""), ("broken", "as promised")]
