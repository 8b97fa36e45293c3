"""What the actors make of their places before they start their parts: the plain classes, without Ray's processes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from telescope.cluster import actors, network
from telescope.cluster.actors import InferenceActor, TrainerActor
from telescope.config import TelescopeConfig
from telescope.trainer import worker

CONFIG = TelescopeConfig.model_validate({"model": "m", "environments": [{"name": "countdown"}]})
ADDRESSES = [("lo", "127.0.0.1/8"), ("net0", "10.0.0.4/24")]


@pytest.fixture
def on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node at 10.0.0.4, whose environment says nothing of interfaces."""
    for variable in network.INTERFACE_VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    monkeypatch.setattr(network, "interface_networks", lambda: ADDRESSES)
    monkeypatch.setattr(network, "own_address", lambda: "10.0.0.4")
    monkeypatch.setattr(actors, "own_address", lambda: "10.0.0.4")


def interfaces() -> set[str | None]:
    return {os.environ.get(variable) for variable in network.INTERFACE_VARIABLES}


@pytest.mark.parametrize(("loopback", "expected"), [(True, "lo"), (False, "net0")])
def test_a_rank_has_its_interface_before_torch_meets_the_others(
    on_a_node: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loopback: bool, expected: str
) -> None:
    met: list[set[str | None]] = []

    def trainer(*arguments: object, **options: object) -> SimpleNamespace:
        met.append(interfaces())
        raise InterruptedError("far enough")

    monkeypatch.setattr(worker, "Trainer", trainer)
    actor = TrainerActor(CONFIG.to_json(), 0, 1, str(tmp_path))
    with pytest.raises(InterruptedError):
        actor.setup("10.0.0.9", 1, loopback)
    assert met == [{expected}]


@pytest.mark.parametrize(("loopback", "expected"), [(True, "lo"), (False, "net0")])
def test_vllm_inherits_the_interface_of_its_actor_and_is_asked_at_the_nodes_address(
    on_a_node: None, tmp_path: Path, loopback: bool, expected: str
) -> None:
    actor = InferenceActor(CONFIG.to_json(), 0, "0.0.0.0", 18890, "secret", "m", str(tmp_path), None, loopback)
    assert interfaces() == {expected}
    assert actor._server.url == "http://10.0.0.4:18890"
