"""Runs, and `telescope sandbox reap` after killed ones, destroy the sandboxes that are left."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.sandbox.test_pool import Service

from telescope.cli.main import main
from telescope.config import TelescopeConfig
from telescope.errors import UserError
from telescope.orchestrator import run_components
from telescope.sandbox import SandboxHandle, SandboxImagePullError
from telescope.sandbox.base import provider_arguments
from telescope.sandbox.ledger import SandboxLedger

SERVICE = f"{Service.__module__}.{Service.__qualname__}"


@pytest.fixture(autouse=True)
def run(tmp_path: Path) -> SandboxLedger:
    """The ledger of a killed run, with a sandbox that it did not destroy."""
    Service.alive.clear()
    folder = tmp_path / "killed"
    (folder / "tables").mkdir(parents=True)
    ledger = SandboxLedger(folder)
    ledger.opened(Service(), SandboxHandle("noted"))
    Service.alive.add("noted")
    Service.labels["noted"] = ledger.run
    return ledger


class KeyedService(Service):
    """A service that needs an argument."""

    name = "keyed"

    def __init__(self, key: str) -> None:
        super().__init__()


def add_of_another_node(ledger: SandboxLedger) -> None:
    """A sandbox with the label of the run, which is in no file here."""
    Service.alive.add("of another node")
    Service.labels["of another node"] = ledger.run


def test_a_shell_in_a_sandbox_that_cannot_be_created_ends_with_the_reason(monkeypatch, capsys):
    service, closed = Service(), []
    service.failures = [SandboxImagePullError("there is no image me/typo")]

    async def close() -> None:
        closed.append(service)

    monkeypatch.setattr(service, "close", close)
    monkeypatch.setattr("telescope.cli.sandbox.get_provider", lambda name: service)
    assert main(["sandbox", "shell", "docker", "--image", "me/typo"]) == 2
    assert capsys.readouterr().err == "telescope: there is no image me/typo\n"
    assert closed == [service]


def test_the_command_destroys_and_names_what_a_killed_run_left(run: SandboxLedger, capsys: pytest.CaptureFixture[str]):
    assert main(["sandbox", "reap", str(run.path.parent)]) == 0
    assert not Service.alive and "1 sandboxes destroyed: service noted" in capsys.readouterr().out
    assert main(["sandbox", "reap", str(run.path.parent)]) == 0
    assert capsys.readouterr().out == "No sandboxes were left.\n"


def test_the_command_takes_the_arguments_of_a_provider_from_the_configuration_of_the_run(run: SandboxLedger):
    run.opened(KeyedService("k"), SandboxHandle("keyed"))
    Service.alive.add("keyed")
    Service.labels["keyed"] = run.run
    kwargs = {"provider": f"{__name__}.KeyedService", "provider_kwargs": {"key": "k"}}
    config = {"environments": [{"name": "mine", "kwargs": kwargs}, {"name": "plain"}], "evals": None}
    (run.path.parent / "config.yaml").write_text(json.dumps(config))
    assert main(["sandbox", "reap", str(run.path.parent)]) == 0
    assert not Service.alive


@pytest.mark.parametrize("kwargs", [
    {"provider_kwargs": {"key": "k"}},  # of `local`, which takes none and which this run has not used
    {"provider": "openai", "provider_kwargs": {"key": "k"}},  # a provider of models
])  # fmt: skip
def test_the_command_searches_only_at_providers_of_sandboxes_that_the_run_used(
    run: SandboxLedger, capsys: pytest.CaptureFixture[str], kwargs: dict[str, object]
):
    (run.path.parent / "config.yaml").write_text(json.dumps({"environments": [{"name": "mine", "kwargs": kwargs}]}))
    assert main(["sandbox", "reap", str(run.path.parent)]) == 0
    assert not Service.alive and not capsys.readouterr().err


def test_arguments_without_a_provider_are_of_the_default_one():
    assert provider_arguments([{"provider_kwargs": {"key": "k"}}, {}, {"provider": "e2b"}, {"provider": "openai"}]) == {
        "local": {"key": "k"}, "e2b": {}}  # fmt: skip


def test_a_run_whose_config_is_broken_is_named_and_reaped(run: SandboxLedger, capsys: pytest.CaptureFixture[str]):
    (run.path.parent / "config.yaml").write_text("[")
    assert main(["sandbox", "reap", "--root", str(run.path.parent.parent)]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("killed: ") and "config.yaml" in output.err
    assert not Service.alive and "service noted" in output.out


def test_a_provider_that_fails_is_named_and_the_command_fails(
    run: SandboxLedger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def destroy(*_: object) -> None:
        raise OSError("no key")

    monkeypatch.setattr(Service, "destroy", destroy)
    assert main(["sandbox", "reap", str(run.path.parent)]) == 1
    assert capsys.readouterr() == ("", f"The sandboxes of {SERVICE} cannot be reaped: no key\n")
    assert main(["sandbox", "reap", str(run.path.parent), "--provider", "e2"]) == 2
    assert "provider='e2' is not known" in capsys.readouterr().err


def test_a_named_provider_is_searched_though_no_file_mentions_it(run: SandboxLedger):
    run.path.unlink()
    add_of_another_node(run)
    assert main(["sandbox", "reap", str(run.path.parent), "--provider", SERVICE]) == 0
    assert Service.alive == set()


def test_a_run_reaps_when_it_starts_and_when_it_ends(
    run: SandboxLedger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run.opened(KeyedService("k"), SandboxHandle("keyed"))
    Service.alive.add("keyed")
    Service.labels["keyed"] = "none"
    directory = SimpleNamespace(path=run.path.parent, recorder=SimpleNamespace(write=None))
    alive_at_start: list[set[str]] = []

    async def connect(*_: object) -> None:
        return None

    def no_workers(*_: object) -> None:
        alive_at_start.append(set(Service.alive))
        add_of_another_node(run)
        raise UserError("no workers today")

    monkeypatch.setattr(run_components, "_connect", connect)
    monkeypatch.setattr(run_components, "RolloutGroup", no_workers)
    keyed = f"{__name__}.KeyedService"
    kwargs = [{"provider": SERVICE}, {"provider": keyed, "provider_kwargs": {"key": "k"}}, {"provider": "openai"}]
    environments = [{"name": "shell_countdown", "kwargs": each} for each in kwargs]
    config = TelescopeConfig.model_validate({"model": "m", "environments": environments})

    async def start() -> None:
        async with AsyncExitStack() as stack:
            await run_components.start_components(
                config,
                directory,
                SimpleNamespace(phase=""),
                stack,
                run.path.parent,  # type: ignore[arg-type, union-attr]
            )

    with pytest.raises(UserError, match="no workers today"):
        asyncio.run(start())
    assert alive_at_start == [set()] and not Service.alive
    assert "cannot be reaped" not in caplog.text
