"""Checkpoints on disk: complete or absent, pruned as configured, and read again."""

import asyncio
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.orchestrator.fakes import StrictRecorder, config_of
from tests.unit.rollout.fakes import tick

from telescope.errors import UserError
from telescope.health import verdict
from telescope.orchestrator import checkpoints
from telescope.orchestrator.checkpoints import HF_META, META, STATE, Checkpointer, CheckpointFolder, with_free_space
from telescope.orchestrator.prompt_sampler import SamplerPosition
from telescope.orchestrator.run_state import STATE_VERSION, RunState
from telescope.orchestrator.status import RunStatus
from telescope.record.files import read_json, replace_json


class FileTrainer:
    """Writes one file per checkpoint; `finish_checkpoint` waits for `may_finish`, and fails with `error`."""

    world_size = 2

    def __init__(self) -> None:
        self.queue = asyncio.Lock()
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.error: OSError | None = None
        self.copy_error: OSError | None = None
        self.saved: list[int] = []
        self.copying: asyncio.Event | None = None

    async def save_checkpoint(self, step: int, directory: Path) -> None:
        assert self.queue.locked(), "a rank would train meanwhile"
        if self.copying is not None:
            await self.copying.wait()
        if self.copy_error is not None:
            raise self.copy_error
        (directory / "shard").write_text(str(step))
        self.saved.append(step)

    async def finish_checkpoint(self) -> dict[str, str]:
        await self.may_finish.wait()
        if self.error is not None:
            raise self.error
        return {}


def directory_of(recorder: StrictRecorder | None = None) -> Any:
    """The directory of a run, as far as a checkpointer uses it."""
    return SimpleNamespace(recorder=recorder or StrictRecorder(), flush_record=lambda: None, run_id="run")


class Saving:
    """A checkpointer in `folder` over a trainer of files."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = CheckpointFolder(folder)
        self.trainer = FileTrainer()
        self.status = RunStatus("test", 10)
        self.recorder = StrictRecorder()
        self.seconds_left: float | None = None
        self.checkpointer = Checkpointer(
            config_of(**changes), self.folder, self.trainer, self.status, directory_of(self.recorder),
            model_files={"config.json": b"{}"}, seconds_left=lambda: self.seconds_left,
        )  # fmt: skip

    async def steps(self, last: int) -> None:
        for step in range(1, last + 1):
            await self.checkpointer.after_step(step, lambda step=step: RunState(step=step))

    async def written(self, last: int) -> None:
        await self.steps(last)
        await self.checkpointer.wait()


async def test_every_nth_step_and_the_last_one_are_saved(tmp_path):
    saving = Saving(tmp_path, checkpoint_every=2)
    await saving.steps(5)
    await saving.checkpointer.save_last(5, lambda: RunState(step=5))
    assert saving.status.phase == "writing the last checkpoint"
    await saving.checkpointer.save_last(5, lambda: RunState(step=5))
    assert saving.folder.steps() == [2, 4, 5]
    assert saving.trainer.saved == [2, 4, 5], "the last one once"
    assert [span["step"] for span in saving.recorder.of("spans", name="checkpoint")] == [2, 4, 5]


async def test_without_checkpoint_every_nothing_is_saved(tmp_path):
    saving = Saving(tmp_path, checkpoint_every=0)
    await saving.steps(3)
    await saving.checkpointer.save_last(3, lambda: RunState(step=3))
    assert os.listdir(tmp_path) == []
    assert saving.status.phase == RunStatus("test", 10).phase, "it does not say that one is written"


async def test_a_checkpoint_has_its_name_only_when_its_files_are_complete(tmp_path):
    saving = Saving(tmp_path, checkpoint_every=1)
    saving.trainer.may_finish.clear()
    await saving.steps(1)
    await tick(20)
    assert saving.folder.steps() == []
    assert not saving.folder.folder_of(1).exists()
    saving.trainer.may_finish.set()
    await saving.checkpointer.wait()
    assert saving.folder.steps() == [1]
    assert read_json(saving.folder.folder_of(1) / META)["ranks"] == 2
    assert read_json(saving.folder.folder_of(1) / HF_META / "config.json") == {}, "it can be served without the model"


@pytest.mark.parametrize("fails", ["error", "copy_error"])
async def test_a_failed_write_costs_that_checkpoint_only(tmp_path, fails):
    saving = Saving(tmp_path, checkpoint_every=1)
    await saving.written(1)
    setattr(saving.trainer, fails, OSError(28, "No space left on device"))
    await saving.checkpointer.after_step(2, lambda: RunState(step=2))
    await saving.checkpointer.wait()
    setattr(saving.trainer, fails, None)
    await saving.checkpointer.after_step(3, lambda: RunState(step=3))
    await saving.checkpointer.wait()
    assert saving.folder.steps() == [1, 3]
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_3"], "nothing of the failed one is left"
    (news,) = [text for text in saving.status.messages if "after step 2 was not written" in text]
    assert "No space" in news
    assert re.search(rf"the disk of {re.escape(str(tmp_path))} has \S+ of \S+ .iB left", news)


async def test_checkpoints_that_fail_one_after_another_are_one_alert(tmp_path):
    saving = Saving(tmp_path, checkpoint_every=1)
    rows = []
    saving.status.record_alerts(lambda row: rows.insert(0, {"attempt": 1, "advice": None, "metrics": []} | row))
    saving.trainer.error = OSError(28, "No space left on device")
    await saving.written(4)
    saving.trainer.error = None
    for step in (5, 6):
        await saving.checkpointer.after_step(step, lambda step=step: RunState(step=step))
    await saving.checkpointer.wait()
    failed, written = [text for text in saving.status.messages if "the checkpoint after step" in text]
    assert failed.startswith("the checkpoint after step 1 was not written")
    assert written == "the checkpoint after step 5 was written, after 4 checkpoints that failed"
    assert [alert["resolved"] for alert in verdict.alerts(rows[1:], 1, [])] == [False]
    assert [alert["resolved"] for alert in verdict.alerts(rows, 1, [])] == [True, True]


async def test_checkpoints_that_fail_for_hours_are_reported_every_hour(tmp_path):
    saving = Saving(tmp_path, checkpoint_every=1)
    await saving.written(1)
    saving.trainer.error = OSError(28, "No space left on device")
    for step in range(2, 7):
        await saving.checkpointer.after_step(step, lambda step=step: RunState(step=step))
        await saving.checkpointer.wait()
        saving.checkpointer._announced_at -= 25 * 60  # as if a step took so long
    news = [text for text in saving.status.messages if "was not written" in text]
    assert [text.split()[4] for text in news] == ["2", "5"]


async def test_a_slow_disk_is_named_only_when_a_step_waits_for_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoints, "SLOW_SECONDS", -1.0)
    saving = Saving(tmp_path, checkpoint_every=2)
    await saving.checkpointer.save_last(1, lambda: RunState(step=1))
    assert "Training waited" not in caplog.text, "the run had ended"
    await saving.steps(4)  # nothing is being written before step 2
    assert caplog.text.count("Training waited") == 1


@pytest.mark.parametrize("slow", ["the step before", "the disk", "the copy"])
async def test_a_stopped_run_skips_a_checkpoint_that_takes_too_long(tmp_path, slow):
    saving = Saving(tmp_path, checkpoint_every=1)
    await saving.written(1)
    saving.seconds_left = 0.0 if slow == "the step before" else 0.05
    if slow == "the copy":
        saving.trainer.copying = asyncio.Event()
    saving.trainer.may_finish.clear()
    last = asyncio.create_task(saving.checkpointer.save_last(2, lambda: RunState(step=2)))
    await tick(20)
    await asyncio.sleep(0.06)
    saving.seconds_left = 0.0
    await asyncio.wait_for(last, 5)
    assert saving.folder.steps() == [1]
    (news,) = saving.status.messages
    assert "after step 2 is skipped: it is not complete 600 s after the run was stopped" in news
    assert news.endswith("The newest checkpoint is step_1")


async def test_a_stopped_run_writes_a_checkpoint_for_which_there_is_time(tmp_path):
    saving = Saving(tmp_path, checkpoint_every=5)
    saving.seconds_left = 60.0
    await saving.checkpointer.save_last(2, lambda: RunState(step=2))
    assert saving.folder.steps() == [2]


@given(st.sets(st.integers(1, 60)), st.integers(1, 5), st.none() | st.integers(1, 7))
def test_the_newest_and_the_multiples_are_kept(steps, keep_last, keep_every):
    folder = CheckpointFolder(Path("unused"))
    folder.steps, folder._remove = lambda: sorted(steps), lambda step: None  # type: ignore[method-assign]
    removed = folder.prune(keep_last, keep_every)
    kept = steps - set(removed)
    assert set(sorted(steps)[-keep_last:]) <= kept
    for step in steps - set(sorted(steps)[-keep_last:]):
        assert (step in kept) == (keep_every is not None and step % keep_every == 0)


async def test_old_checkpoints_are_removed(tmp_path):
    saving = Saving(tmp_path, checkpoint_every=1, checkpoint_keep_last=2, checkpoint_keep_every=3)
    await saving.written(7)
    assert saving.folder.steps() == [3, 6, 7]


async def test_a_run_that_continues_after_an_earlier_step_replaces_the_later_checkpoints(tmp_path):
    await Saving(tmp_path, checkpoint_every=1).written(4)
    again = Saving(tmp_path, checkpoint_every=1, checkpoint_keep_last=1)
    again.folder.continue_after(2)
    assert again.folder.steps() == [1, 2]
    again.checkpointer = Checkpointer(
        config_of(checkpoint_every=1, checkpoint_keep_last=1), again.folder, again.trainer, again.status,
        directory_of(), last_step=2,
    )  # fmt: skip
    await again.checkpointer.save_last(2, lambda: RunState(step=2))
    assert again.trainer.saved == [], "it is the checkpoint that was loaded"
    await again.checkpointer.save_last(3, lambda: RunState(step=3))
    assert again.folder.steps() == [3]


async def test_the_state_is_read_back(tmp_path):
    saving = Saving(tmp_path, checkpoint_every=1)
    state = RunState(step=1, sampler=SamplerPosition(9, (3, 5)))
    await saving.checkpointer.after_step(1, lambda: state)
    await saving.checkpointer.wait()
    checkpoint = saving.folder.load(True)
    assert (checkpoint.step, checkpoint.state) == (1, state)
    assert saving.folder.load(1).path == checkpoint.path


@pytest.mark.parametrize(("wanted", "message"), [
    (True, "holds no complete checkpoint"), (3, "step_3 does not exist. There is step_1, step_2"),
])  # fmt: skip
async def test_a_missing_checkpoint_is_refused_with_those_that_exist(tmp_path, wanted, message):
    saving = Saving(tmp_path, checkpoint_every=1)
    if wanted is not True:
        await saving.written(2)
    with pytest.raises(UserError, match=message):
        saving.folder.load(wanted)


async def test_a_state_of_another_version_is_refused_with_both_numbers(tmp_path):
    saving = Saving(tmp_path, checkpoint_every=1)
    await saving.written(1)
    path = saving.folder.folder_of(1) / STATE
    replace_json(path, {**read_json(path), "version": 99})
    with pytest.raises(UserError, match=rf"version 99.*version {STATE_VERSION}"):
        saving.folder.load(True)


def test_partial_checkpoints_are_ignored_and_removed(tmp_path):
    folder = CheckpointFolder(tmp_path)
    (folder.begin(4) / "shard").write_text("half")
    (tmp_path / "step_9").mkdir()  # without meta.json, as a copy that was broken off
    assert folder.steps() == []
    (folder.complete(folder.begin(1), 1, {}) / STATE).write_text("{}")
    with pytest.raises(UserError, match=r"step_9 is incomplete: it has no meta.json. There is step_1"):
        folder.load(9)
    folder.continue_after(0)
    assert [path.name for path in tmp_path.iterdir()] == ["step_9"]


def test_a_full_disk_is_named_before_what_torch_says_of_it(tmp_path, monkeypatch):
    error = OSError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000, total=34 << 20))
    assert with_free_space(error, tmp_path / "partial") == f"the disk of {tmp_path} has 0.0 of 34 MiB left ({error})"
