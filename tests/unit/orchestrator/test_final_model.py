"""The trained model is saved where there is space for it."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from telescope.errors import RunError
from telescope.orchestrator import run
from telescope.orchestrator.run import save_where_possible
from telescope.orchestrator.status import RunStatus


class Disks:
    """Saves a model into folders that have space, and fails in the others."""

    def __init__(self, *full: Path) -> None:
        self.full = list(full)
        self.saved: list[Path] = []

    async def save(self, folder: Path) -> None:
        if any(folder.is_relative_to(disk) for disk in self.full):
            raise OSError(f"{folder} needs 12 GiB: No space left on device")
        self.saved.append(folder)


def save(disks: Disks, run: Path, status: RunStatus, **options: float) -> Coroutine[Any, Any, Path]:
    return save_where_possible(disks.save, run / "model", status, **options)


def reported(status: RunStatus) -> list[tuple[str, str]]:
    alerts: list[dict[str, Any]] = []
    status.record_alerts(alerts.append)
    return [(alert["level"], alert["message"]) for alert in alerts]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "temporary_base", lambda: str(tmp_path / "temporary"))
    return tmp_path / "temporary"


async def test_a_model_that_the_run_directory_cannot_take_is_saved_elsewhere(tmp_path: Path, temporary: Path) -> None:
    disks, status = Disks(tmp_path / "run"), RunStatus("demo", 1)
    folder = await save(disks, tmp_path / "run", status)
    assert disks.saved == [folder]
    assert folder.is_relative_to(temporary)
    ((level, message),) = reported(status)
    assert level == "warning", "nothing is lost"
    assert f"saved to {folder}, because {tmp_path / 'run' / 'model'} needs 12 GiB" in message


async def test_without_space_anywhere_a_run_waits_until_there_is_some(tmp_path: Path, temporary: Path) -> None:
    disks, status = Disks(tmp_path), RunStatus("demo", 1)
    saving = asyncio.ensure_future(save(disks, tmp_path / "run", status, wait_seconds=600, retry_seconds=0.001))
    while not status.messages:  # noqa: ASYNC110
        await asyncio.sleep(0)
    ((level, message),) = reported(status)
    assert level == "error" and "12 GiB" in message and "Free space" in message
    disks.full.clear()
    assert await saving == tmp_path / "run" / "model"


async def test_a_run_that_never_gets_space_names_folders_sizes_and_the_fix(tmp_path: Path, temporary: Path) -> None:
    disks, status = Disks(tmp_path), RunStatus("demo", 1)
    with pytest.raises(RunError) as caught:
        await save(disks, tmp_path / "run", status, wait_seconds=0.005, retry_seconds=0.001)
    for text in (f"{tmp_path / 'run' / 'model'} needs 12 GiB", f"{temporary}/telescope-model-run-", "Free space"):
        assert text in str(caught.value)
    assert len(reported(status)) == 1
