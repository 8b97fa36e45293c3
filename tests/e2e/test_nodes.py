"""Trains on three nodes of one machine, one of which is lost and returns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.kills import FLAGS, check_ledger, rows
from tests.e2e.nodes import Nodes
from tests.e2e.train_command import Command

from telescope.sandbox.ledger import SandboxLedger

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.sandbox, pytest.mark.namespaces]

PORT = 18720
LOST = 2
FIELDS = {
    **FLAGS, "max_async_rollout": 1, "inference_num_workers": 2, "trainer_num_workers": 3, "rollout_num_workers": 3,
    "ray_inference_placement_strategy": "SPREAD", "ray_trainer_placement_strategy": "SPREAD",
    "trainer_max_restarts": 3,
}  # fmt: skip


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")  # a process for each core otherwise
    monkeypatch.setenv("RAY_health_check_period_ms", "1000")  # how soon the loss of a node is noticed
    with Nodes(3) as three:
        yield three


@pytest.mark.timeout(2400)
def test_a_run_on_three_nodes_goes_on_without_one_and_uses_it_again_when_it_has_returned(
    tiny_model: Path, tmp_path: Path, nodes: Nodes
) -> None:
    checks = ["doctor", "--cluster", "--nodes=3", f"--address={nodes.ray_address}", f"--run-dir={tmp_path}"]
    checked = subprocess.run([*nodes.within(0), sys.executable, "-m", "telescope", *checks], timeout=300)
    assert checked.returncode == 0

    flags = [f"--ray_address={nodes.ray_address}", *(f"--{name}={value}" for name, value in FIELDS.items())]
    with Command(
        tiny_model, tmp_path, PORT, *flags, config="demo_sandbox.yaml", within=nodes.within(0), number_of_steps=16
    ) as command:
        wait_for_step(command, 4)
        for index in range(3):
            assert "TrainerActor" in nodes.titles(index)
            assert "RolloutActor" in nodes.titles(index)
            assert "bwrap" in nodes.titles(index)
        assert sum("vllm.entrypoints" in nodes.titles(index) for index in range(3)) == 2
        nodes.lose(LOST)
        run = command.finish(900)
    check_ledger(run)
    assert "(restart 1 of 3)" in command.log.read_text()
    assert len({row["node"] for row in rows(run, "gauges")} - {None}) == 3
    assert {row["step"] for row in rows(run, "samples", "eval")} == {15}
    assert not left_sandboxes(command.run_dir)

    nodes.start(LOST)
    with Command(tiny_model, tmp_path, PORT, within=nodes.within(0), number_of_steps=20, resume=True) as command:
        wait_for_step(command, 18)
        for name in ("TrainerActor", "RolloutActor"):
            assert name in nodes.titles(LOST)
        check_ledger(command.finish(900))
    assert not left_sandboxes(command.run_dir)


def wait_for_step(command: Command, step: int) -> None:
    command.wait_for(f"step {step}", command.printed(f"step {step} ("), 600)


def left_sandboxes(run_dir: Path) -> list[str]:
    """The sandboxes that a run made and did not destroy."""
    entries = list(SandboxLedger(run_dir).rows())
    destroyed = {row["id"] for row in entries if row.get("destroyed")}
    assert destroyed
    return [row["id"] for row in entries if row["id"] not in destroyed]
