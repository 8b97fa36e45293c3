"""Few runs stay open, and a closed one opens again."""

import pytest
from fastapi.testclient import TestClient
from tests.unit.dashboard.conftest import write_step

from telescope.dashboard import registry
from telescope.dashboard.app import create_app
from telescope.record.recorder import Recorder


@pytest.fixture
def three(tmp_path):
    """Requests to the runs `a`, `b` and `c`, and their registry."""
    for name in "abc":
        with Recorder(tmp_path / name) as recorder:
            write_step(recorder, 0)
    app = create_app([tmp_path])
    return TestClient(app, base_url="http://localhost"), app.state.registry


def opened(runs):
    return {run_id for run_id, store in runs.stores().items() if store.is_open}


def ask(client, *runs):
    for run in runs:
        assert client.get(f"/api/runs/{run}/samples").json()["total"] == 16


def test_the_runs_that_were_used_longest_ago_are_closed(three, monkeypatch):
    client, runs = three
    monkeypatch.setattr(registry, "MAX_OPENED", 2)
    monkeypatch.setattr(registry, "IDLE_SECONDS", -1.0)
    ask(client, "a", "b", "a", "c")
    assert opened(runs) == {"a", "c"}
    ask(client, "b")
    assert opened(runs) == {"b", "c"}


def test_a_run_that_was_just_used_stays_open(three, monkeypatch):
    client, runs = three
    monkeypatch.setattr(registry, "MAX_OPENED", 1)
    ask(client, "a", "b", "c")
    assert opened(runs) == {"a", "b", "c"}


def test_the_list_of_runs_opens_none(three):
    client, runs = three
    client.get("/api/runs?fields=last.entropy")
    assert opened(runs) == set()
