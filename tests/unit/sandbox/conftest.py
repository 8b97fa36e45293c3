"""Providers over fake services: the SDK's module, or the command, is one that runs commands on this machine."""

import importlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.fakes.sandbox_sdks.machine import MACHINE, Machine

from telescope.sandbox import get_provider
from telescope.sandbox.contract import Trial

MODULES = {"prime": "prime_sandboxes", "modal": "modal", "daytona": "daytona", "e2b": "e2b"}
KEYS = {"prime": "PRIME_API_KEY", "modal": "MODAL_TOKEN_ID", "daytona": "DAYTONA_API_KEY", "e2b": "E2B_API_KEY"}
ROOT = Path(__file__).parents[3]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Puts the fakes in the place of all SDKs, and keys in the environment."""
    for module in MODULES.values():
        monkeypatch.setitem(sys.modules, module, importlib.import_module(f"tests.fakes.sandbox_sdks.{module}"))
    for key in KEYS.values():
        monkeypatch.setenv(key, "key")
    monkeypatch.delenv("DEFAULT_DOCKER_IMAGE", raising=False)
    MACHINE.__init__()  # type: ignore[misc]
    yield MACHINE
    MACHINE.close()


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a fake `docker` and `podman` first on PATH. Returns the folder with their state."""
    for program in ("docker", "podman"):
        path = tmp_path / program
        path.write_text(
            f'#!/bin/sh\nexport PYTHONPATH={ROOT}\nexec {sys.executable} -S -m tests.fakes.sandbox_sdks.docker "$@"\n'
        )
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_FAKE", str(tmp_path))
    return tmp_path


def docker_calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


@pytest.fixture
async def trial(name: str, machine: Machine, docker: Path) -> AsyncIterator[Trial]:
    trial = Trial(get_provider(name))
    if name == "docker":
        trial.num_creates = 4  # each call of the fake starts Python
    yield trial
    await trial.close()
    assert not machine.boxes
    assert not [name for name in os.listdir(docker) if name.endswith(".json")]
