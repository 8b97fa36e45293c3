"""Writes, keeps and loads the checkpoints of a run.

    checkpoints/step_N/         after N finished training steps
        meta.json               step, model, ranks, versions, config and the digest of every file; written last
        orchestrator_state.json the state of the loops (`run_state`)
        hf_meta/                config, tokenizer and chat template of the model, in HuggingFace format
        *.distcp, .metadata     weights and optimizer state (`trainer.backends.fsdp.checkpoint`)

Training pauses while the ranks copy their state to host memory; a task then waits for the files. Invariants: one
checkpoint is written at a time. `step_N` is complete or absent: it is written under another name and renamed. A failed
write costs that checkpoint only. Ranks compute the digests of their shards after writing them, while training goes on.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

import telescope
from telescope.config import TelescopeConfig
from telescope.config.loader import choose_checkpoint_dir
from telescope.config.messages import show
from telescope.errors import UserError
from telescope.health import rules
from telescope.orchestrator.run_state import RunState
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import PROGRESS_SECONDS
from telescope.record.files import read_json, replace_json, sync
from telescope.utils.digests import damage, digests_of, files_below
from telescope.utils.text import free_space, pluralize, single_line
from telescope.weights.model_folder import base_weights

if TYPE_CHECKING:
    from telescope.cluster.trainer_group import TrainerGroup
    from telescope.orchestrator.run_directory import RunDirectory

logger = logging.getLogger(__name__)

META = "meta.json"
STATE = "orchestrator_state.json"
HF_META = "hf_meta"
PARTIAL = ".partial-"  # name prefix of an incomplete checkpoint, which the next start removes
SILENT_SECONDS = 3600.0  # between reports of checkpoints that fail one after another
SLOW_SECONDS = 5.0  # a longer wait for the disk is reported
LAYOUT_VERSION = 1  # Version of the files of a checkpoint. Raise it when an older Telescope could not read them.

STEP_NAME = re.compile(r"step_(0|[1-9][0-9]*)")
"""Name of a complete checkpoint's folder. `step_0060` does not match, because no step has that folder."""


class _SavedEnvironment(msgspec.Struct):
    name: str
    weight: float
    kwargs: dict[str, Any]


class SavedConfig(msgspec.Struct):
    """The fields of a checkpoint's config that are read without this version's schema."""

    environments: list[_SavedEnvironment] = []
    evals: list[dict[str, Any]] = []
    model: Annotated[str, msgspec.Meta(min_length=1)] = "model"
    model_dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    lora_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    lora_alpha: float = 1.0
    lora_dropout: float = 0.0
    lora_target_modules: str | list[str] = "all-linear"


class _Base(msgspec.Struct):
    model: str
    weights: str


class _Meta(msgspec.Struct):
    """Schema of `meta.json`. Earlier versions did not write `files`, `base` and `run`."""

    layout: int
    step: Annotated[int, msgspec.Meta(ge=0)]
    time: float
    model: str
    train_backend: str
    ranks: int
    training_state: bool
    config: SavedConfig
    config_hash: str | None = None
    telescope: str | None = None
    run: str | None = None
    files: dict[str, str] = {}
    base: _Base | None = None


def read_meta(folder: Path) -> dict[str, Any]:
    """Returns `meta.json` of a checkpoint. Raises `UserError` if the folder is no checkpoint or has another version."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Give the step_N folder of a checkpoint")
    if not (folder / META).exists():
        steps = CheckpointFolder(folder).steps()
        hint = f"Give one of its folders, such as step_{steps[-1]}" if steps else "Give a step_N folder that has one"
        raise UserError(f"{folder} is not a complete checkpoint: it has no {META}. {hint}")
    try:
        meta = read_json(folder / META)
        if isinstance(meta, dict) and meta.get("layout", LAYOUT_VERSION) != LAYOUT_VERSION:
            raise UserError(
                f"{folder} has layout {show(meta['layout'])}, and this version of Telescope reads layout "
                f"{LAYOUT_VERSION}. Use the version of Telescope that wrote it"
            )
        msgspec.convert(meta, _Meta)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder / META} cannot be read: {single_line(str(error))}. Use another step") from error
    assert isinstance(meta, dict)
    return meta


def refuse_damage(folder: Path, meta: Mapping[str, Any]) -> None:
    """Reads all files of a checkpoint. Raises `UserError` if a file has changed since it was written."""
    if found := damage(folder, meta.get("files", {})):
        earlier = [f"step_{step}" for step in CheckpointFolder(folder.parent).steps() if step < meta["step"]]
        there_is = f" (there is {', '.join(earlier)})" if earlier else ""
        raise UserError(f"{folder} is damaged: {'; '.join(found)}. Copy it again, or use another step{there_is}")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    meta: dict[str, Any]
    state: RunState
    notes: tuple[str, ...] = ()
    """Messages for the user of the run that continues from this checkpoint (`resume`)."""


class CheckpointFolder:
    """The checkpoints of one run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def for_run(cls, config: TelescopeConfig, run_dir: Path) -> CheckpointFolder:
        """Returns the folder in `checkpoint_dir`, by default in the run directory."""
        return cls(choose_checkpoint_dir(config.checkpoint_dir, run_dir))

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, in order."""
        if not self.path.is_dir():
            return []
        names = (STEP_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if (entry / META).is_file())
        return sorted(int(match[1]) for match in names if match)

    def folder_of(self, step: int) -> Path:
        """Returns the folder of a step."""
        return self.path / f"step_{step}"

    def begin(self, step: int) -> Path:
        """Creates the empty folder for a step's checkpoint. Raises `OSError`."""
        partial = self.path / f"{PARTIAL}step_{step}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def complete(self, partial: Path, step: int, meta: dict[str, Any]) -> Path:
        """Renames a written checkpoint to its final name. Raises `OSError`."""
        replace_json(partial / META, meta)
        folder = self.folder_of(step)
        partial.rename(folder)
        sync(self.path)
        return folder

    def prune(self, keep_last: int | None, keep_every: int | None) -> list[int]:
        """Removes all but the newest `keep_last` and the multiples of `keep_every`. Returns the removed steps."""
        older = self.steps()[:-keep_last] if keep_last is not None else []
        removed = [step for step in older if not (keep_every and step % keep_every == 0)]
        for step in removed:
            self._remove(step)
        return removed

    def continue_after(self, step: int) -> None:
        """Removes remains of interrupted writes, and checkpoints after `step`, which belong to an abandoned attempt."""
        for later in [known for known in self.steps() if known > step]:
            self._remove(later)
        for left in self.path.glob(f"{PARTIAL}step_*"):
            shutil.rmtree(left)

    def _remove(self, step: int) -> None:
        # Renamed first, so that a kill in between leaves no checkpoint that looks complete.
        renamed = self.path / f"{PARTIAL}step_{step}"
        shutil.rmtree(renamed, ignore_errors=True)
        self.folder_of(step).rename(renamed)
        shutil.rmtree(renamed)

    def load(self, wanted: bool | int) -> Checkpoint:
        """Reads the newest checkpoint (if `wanted` is true) or that of a step, without weights. Raises `UserError`."""
        steps = self.steps()
        if not steps:
            raise UserError(
                f"resume_from_checkpoint is {show(wanted)}, but {self.path} holds no complete checkpoint. Set run_dir "
                "(or checkpoint_dir) to a run that has one, or resume_from_checkpoint to false with an empty run_dir"
            )
        step = steps[-1] if wanted is True else int(wanted)
        path = self.folder_of(step)
        if step not in steps:
            problem = f"is incomplete: it has no {META}" if path.is_dir() else "does not exist"
            raise UserError(
                f"resume_from_checkpoint is {step}, but {path} {problem}. There is "
                f"{', '.join(f'step_{known}' for known in steps)}"
            )
        meta = read_meta(path)
        try:
            values = read_json(path / STATE)
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path / STATE} cannot be read: {single_line(str(error))}. Use another step") from error
        if values is None:
            raise UserError(f"{path} is incomplete: it has no {STATE}. Resume from another step")
        state = RunState.load_state_dict(values)
        if not meta["step"] == state.step == step:
            raise UserError(
                f"{path} is after step {meta['step']} in its {META} and {state.step} in its {STATE}: it was renamed or "
                "edited. Restore it, or resume from another step"
            )
        return Checkpoint(path, step, meta, state)


@dataclass(eq=False)
class Checkpointer:
    """Writes the checkpoints of a live run."""

    config: TelescopeConfig
    folder: CheckpointFolder
    trainer: TrainerGroup
    status: RunStatus
    directory: RunDirectory
    _: KW_ONLY
    last_step: int = 0
    """Step of the newest complete checkpoint, initially of the checkpoint from which the run continues."""
    model_files: Mapping[str, bytes] = field(default_factory=dict)
    """Content of `hf_meta/`."""
    seconds_left: Callable[[], float | None] = lambda: None
    """Returns how long the run still waits for a checkpoint, or None without a limit."""
    _writing: asyncio.Task[None] | None = None
    _num_failed: int = 0
    """Checkpoints that were not written since the last one that was."""
    _announced_at: float = 0.0
    """When the last failure was reported, by the monotonic clock."""

    async def after_step(self, step: int, state: Callable[[], RunState]) -> None:
        """Starts the checkpoint of a finished step, if one is due. First waits until the last one is written."""
        every = int(self.config.checkpoint_every)
        if every and step % every == 0:
            started_at = time.time()
            if await self.wait() and (waited := time.time() - started_at) > SLOW_SECONDS:
                logger.warning(
                    "Training waited %.1f s until the last checkpoint was written. Raise checkpoint_every, or use a "
                    "faster disk", waited
                )  # fmt: skip
            await self._begin(step, state().state_dict())  # encoded now: the loops change these objects

    async def save_last(
        self, step: int, state: Callable[[], RunState], phase: str = "writing the last checkpoint"
    ) -> None:
        """Writes the checkpoint of the last step, unless it exists. Waits as long as time is left."""
        if self._writing is not None or (self.config.checkpoint_every and step > self.last_step):
            self.status.phase = phase
        await self.wait()
        if self.config.checkpoint_every and step > self.last_step:
            await self._begin(step, state().state_dict())
            await self.wait()

    async def wait(self) -> bool:
        """Waits until no checkpoint is being written, unless the time is over. Returns whether it waited for one."""
        if self._writing is not None:
            while not self._writing.done():
                left = self.seconds_left()
                if left == 0:
                    self._writing.cancel()  # the next start removes its remains
                    self._skipped(self._writing.get_name())
                    self._writing = None
                    return False
                await asyncio.wait([self._writing], timeout=min(left or PROGRESS_SECONDS, PROGRESS_SECONDS))
                self.status.progressed()
            self._writing.result()
            self._writing = None
            return True
        return False

    async def ranks_replaced(self) -> None:
        """Waits for the end of a write whose ranks are gone. `continue_after` removes its remains."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
            if (error := self._writing.exception()) is not None:
                logger.info("The last checkpoint was not written: %s", error)
            self._writing = None

    async def _begin(self, step: int, values: dict[str, Any]) -> None:
        """Copies the ranks' state, which a task then writes. `values` is the state of the loops."""
        name = f"the checkpoint after step {step}"
        started_at, left = time.time(), self.seconds_left()
        if left == 0:
            self._skipped(name)
            return
        try:
            partial = await asyncio.to_thread(self.folder.begin, step)
        except OSError as error:
            self._failed(step, str(error))
            return
        try:
            async with asyncio.timeout(left), self.trainer.queue:
                await self.trainer.save_checkpoint(step, partial)
        except TimeoutError:
            self._skipped(name)
            return
        except OSError as error:
            cause = with_free_space(error, partial)
            with suppress(OSError):  # the same cause; ranks that did copy must finish
                await self.trainer.finish_checkpoint()
            await asyncio.to_thread(shutil.rmtree, partial, True)
            self._failed(step, cause)
            return
        self.status.progressed()
        paused_at, started_at = started_at, time.time()
        logger.info("Training paused %.2f s to copy the checkpoint after step %d", started_at - paused_at, step)
        writing = self._write(step, partial, values, paused_at, started_at)
        self._writing = asyncio.create_task(writing, name=name)

    async def _write(
        self, step: int, partial: Path, values: dict[str, Any], paused_at: float, started_at: float
    ) -> None:
        try:
            digests = await self.trainer.finish_checkpoint()
            await asyncio.to_thread(self._complete, step, partial, values, digests)
        except OSError as error:
            cause = with_free_space(error, partial)
            await asyncio.to_thread(shutil.rmtree, partial, True)
            self._failed(step, cause)
            return
        self.last_step, num_failed, self._num_failed = step, self._num_failed, 0
        ended_at = time.time()
        logger.info("The checkpoint after step %d was written in %.1f s", step, ended_at - started_at)
        if num_failed:
            before = pluralize(num_failed, "checkpoint")
            self.status.report(
                f"the checkpoint after step {step} was written, after {before} that failed", "checkpoint"
            )
        row = {"name": "checkpoint", "component": "orchestrator", "step": step, "start": paused_at, "end": ended_at}
        self.directory.recorder.write(
            "spans", {**row, "attributes": {"paused_seconds": f"{started_at - paused_at:.6f}"}}
        )
        try:
            removed = await asyncio.to_thread(
                self.folder.prune, self.config.checkpoint_keep_last, self.config.checkpoint_keep_every
            )
        except OSError as error:
            self._announce(f"old checkpoints cannot be removed: {error}. Remove them by hand")
            return
        if removed:
            logger.info("Removed %s (checkpoint_keep_last)", pluralize(len(removed), "checkpoint"))

    def _complete(self, step: int, partial: Path, values: dict[str, Any], digests: dict[str, str]) -> None:
        """Adds the driver's files. The ranks have computed `digests`."""
        replace_json(partial / STATE, values)
        (partial / HF_META).mkdir()
        for name, content in self.model_files.items():
            (partial / HF_META / name).write_bytes(content)
        self.directory.flush_record()  # a run that continues from the checkpoint lacks no rows
        config = self.config
        self.folder.complete(
            partial,
            step,
            {
                "layout": LAYOUT_VERSION,
                "step": step,
                "time": time.time(),
                "model": config.model,
                "train_backend": config.train_backend,
                "ranks": self.trainer.world_size,
                "training_state": config.checkpoint_save_training_state,
                "config_hash": config.hash,
                "config": config.values,
                "telescope": telescope.__version__,
                "run": self.directory.run_id,
                "base": base_weights(config.model) if config.lora_rank else None,
                "files": digests | digests_of(partial, set(files_below(partial)) - digests.keys()),
            },
        )

    def _failed(self, step: int, cause: str) -> None:
        """Reports the first of consecutive failures, then one an hour. The others are only logged."""
        self._num_failed += 1
        now = time.monotonic()
        news = f"the checkpoint after step {step} was not written: {cause}. {self._newest()}"
        if self._num_failed == 1 or now - self._announced_at >= SILENT_SECONDS:
            self._announced_at = now
            self._announce(news)
        else:
            logger.warning("%s", news)

    def _skipped(self, what: str) -> None:
        limit = self.config.checkpoint_on_exit_timeout_s
        self._announce(
            f"{what} is skipped: it is not complete {limit:g} s after the run was stopped "
            f"(checkpoint_on_exit_timeout_s). {self._newest()}"
        )

    def _newest(self) -> str:
        return f"The newest checkpoint is step_{self.last_step}" if self.last_step else "No checkpoint exists yet"

    def _announce(self, news: str) -> None:
        self.status.report(news, "checkpoint", "warning", log=logger)


def with_free_space(error: OSError, folder: Path) -> str:
    """Returns the error's text with the disk's free space, which torch's message for a full disk does not name.

    The space comes first if it can be the cause.
    """
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return str(error)
    space = f"the disk of {folder.parent} has {free_space(usage.free, usage.total)} left"
    is_full = error.errno in (None, errno.ENOSPC, errno.EDQUOT) and rules.disk(usage.free, usage.total, "")
    return f"{space} ({error})" if is_full else f"{error} ({space})"
