"""Manages the run directory of one attempt.

It is created first, and closed with the run's summary.

Owns the order of opening and closing the record. `telescope.record` owns its contents.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from telescope.config import TelescopeConfig
from telescope.config.loader import choose_run_dir
from telescope.config.model_source import files_here
from telescope.config.yaml_file import dump_yaml
from telescope.errors import RunError, UserError
from telescope.orchestrator.status import Interrupted, RunSummary
from telescope.record.alerts import Alerts
from telescope.record.files import RunFiles, replace_file, replace_json
from telescope.record.log_files import LogFiles
from telescope.record.logging import setup_logging
from telescope.record.reader import Run
from telescope.record.recorder import REPORTED, Recorder
from telescope.record.run_info import RunInfo, attempt_row, begin_run, end_run, next_attempt, write_run_json
from telescope.trackers.launch import TrackerProcess
from telescope.weights.model_folder import read_origin

FLUSH_SECONDS = 5.0  # time for the record to write its last rows before the summary; closing allows more

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RunDirectory:
    """`path` is the run directory. `recorder`, `alerts` and `trackers` exist while the record is open."""

    path: Path
    config: TelescopeConfig
    notes: list[str]
    is_resumed: bool = False
    recorder: Recorder = field(init=False)
    alerts: Alerts = field(init=False)
    trackers: TrackerProcess = field(init=False)
    _info: RunInfo = field(init=False)

    def __post_init__(self) -> None:
        self._has_started = False
        self._attempt: dict[str, Any] = {}
        self._known_problem: str | None = None

    @classmethod
    def create(
        cls, config: TelescopeConfig, notes: list[str], *, path: Path | None = None, is_resumed: bool = False
    ) -> RunDirectory:
        """Creates a directory, or reopens the directory of a resumed run. Raises UserError if it cannot be written."""
        path = path or choose_run_dir(config)
        try:
            path = _make_folder(path, must_be_new=config.run_dir is None and not is_resumed)
        except OSError as error:
            raise _not_writable(path, error) from error
        return cls(path, config, notes, is_resumed=is_resumed)

    @contextmanager
    def open_record(self, *, console: bool, tell: Callable[[str], None] | None = None) -> Iterator[Recorder]:
        """Opens the record of this attempt. With `console`, it prints warnings. `tell` is of `Alerts`."""
        config = self.config
        self.recorder = Recorder(
            self.path,
            attempt=next_attempt(self.path),
            flush_seconds=config.metrics_logger_interval_seconds,
            tail_seconds=config.event_tail_window_seconds,
            block_seconds=config.event_block_duration_seconds,
            block_rollouts=config.rollout_block_size,
        )
        self.alerts = Alerts(self.recorder, config.alert_command, config.wandb_run_name, tell)
        with ExitStack() as stack:
            stack.callback(self.recorder.close)
            stack.callback(self.alerts.close)
            if not self.is_resumed:  # only now: the recorder has locked the directory, so it is not another run's
                try:
                    _write_config(self.path, config)
                except OSError as error:
                    raise _not_writable(self.path, error) from error
            setup_logging(self.path, "driver", self.recorder, alerts=self.alerts, debug=config.debug, console=console)
            self._begin_attempt(self.notes)
            stack.enter_context(LogFiles(self.path, self.recorder.write))
            self.trackers = TrackerProcess(config, self.path)
            try:
                yield self.recorder
            finally:
                stack.close()
                self.trackers.close()  # last, so that it copies the complete record

    @property
    def run_id(self) -> str:
        """Returns the run's id in `run.json`, while the record is open."""
        return self._info.run_id

    def started(self, topology: dict[str, str], first_step: int) -> None:
        """Records that all components run and the checkpoint, if any, is loaded.

        From now on, the attempt replaces the rows of earlier attempts from `first_step` on.
        """
        if self.is_resumed and not self._has_started:
            try:
                _write_config(self.path, self.config)
                _retire_results(self.path, first_step)
            except OSError as error:
                logger.error("files of the last attempt cannot be replaced: %s", error)
        self._has_started = True
        started = {"topology": topology, "first_step": first_step, "model_config": self._model_config()}
        self.recorder.write("attempts", {**self._attempt, **started})

    def begin_next_attempt(self, note: str) -> None:
        """Begins another attempt in this process. Later rows belong to it. Call `started` next."""
        self.recorder.attempt += 1
        self._begin_attempt([note])

    def _begin_attempt(self, notes: list[str]) -> None:
        config = self.config
        self._attempt = attempt_row(config.hash, notes)
        self._info = begin_run(
            self.recorder,
            name=config.wandb_run_name,
            config_hash=config.hash,
            config_json=config.to_json(),
            project=config.wandb_project,
            tags=list(config.wandb_tags),
            attempt=self._attempt,
            num_steps=config.number_of_steps,
        )

    def _model_config(self) -> str | None:
        try:
            files = files_here(self.config)
            content = files.read_object("config.json") if files is not None else None
        except UserError as error:  # the model of a run with its own backend may have another format
            logger.info("The model's config.json is not recorded: %s", error)
            return None
        return None if content is None else json.dumps(content)

    def evaluated_before(self, accuracy: float) -> None:
        """Writes the accuracy before training to `run.json`."""
        self._info = replace(self._info, heldout_before=accuracy)
        self.recorder.replace_json(RunFiles(self.path).run_json, asdict(self._info))

    def ended_at_once(self) -> None:
        """Writes to `run.json` that the user ended the run immediately."""
        error = "ended at once by a second interrupt"
        write_run_json(self.path, replace(self._info, status="stopped", ended_at=time.time(), error=error))

    def flush_record(self) -> None:
        """Writes the newest rows, unless the disk has failed. Waits briefly."""
        if self.recorder.error is None:
            self.recorder.flush(FLUSH_SECONDS)

    def record_problem(self) -> str | None:
        """Returns why the record is incomplete, or None. Waits briefly for the newest rows."""
        self.flush_record()
        if self.recorder.error is None and (dropped := self.recorder.dropped):
            counts = ", ".join(f"{count} of {name}" for name, count in sorted(dropped.items()))
            return f"rows were dropped while the disk could not be written: {counts}"
        return self.recorder.error

    def record_news(self) -> str | None:
        """Returns a message if the record just failed or recovered, else None."""
        problem = self.recorder.error
        if (problem is None) == (self._known_problem is None):
            return None
        self._known_problem = problem
        if problem is None:
            return "the record of this run is written again"
        return f"THE RECORD OF THIS RUN CANNOT BE WRITTEN ({problem}): the run continues and keeps its rows in memory"

    def ended(self, summary: RunSummary, error: BaseException | None = None) -> None:
        """Writes `summary.json` and the end of the attempt. Logs disk errors, then the end, with the stack of a bug."""
        try:
            if self._has_started or not self.is_resumed:
                replace_json(RunFiles(self.path).summary, asdict(summary))
        except OSError as failure:
            logger.error("The summary of this run cannot be written: %s", failure)
        alert = {"time": time.time(), "step": summary.steps}
        if summary.error is not None:
            self.alerts.add({**alert, "level": "error", "kind": "run", "message": summary.error})
            bug = None if isinstance(error, UserError | RunError | Interrupted) else error
            logger.error("The run %s: %s", summary.sentence, summary.error, exc_info=bug, extra=REPORTED)
        else:
            self.alerts.run_command({**alert, "level": "info", "kind": "end", "message": summary.sentence})
            logger.info("The run %s", summary.sentence, extra=REPORTED)
        end_run(self.recorder, self._info, summary.status, config_json=self.config.to_json(), error=summary.error)


def _not_writable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"run_dir: {str(path)!r} cannot be written ({error.strerror or error}). Choose another folder with "
        "--run_dir or TELESCOPE_RUN_DIR, or fix its permissions."
    )


def _make_folder(path: Path, *, must_be_new: bool) -> Path:
    """Creates a folder and its parents. If it must be new, a number may be added to its name. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, chosen = 1, path
    while True:
        try:
            chosen.mkdir(exist_ok=not must_be_new)
            return chosen
        except FileExistsError:
            if not must_be_new:  # a file has its name
                raise
            number += 1
            chosen = path.with_name(f"{path.name}-{number}")


def _retire_results(path: Path, first_step: int) -> None:
    """Removes the last attempt's summary, and its model if the checkpoint after `first_step` has the same weights.

    Renames the model otherwise. Raises `OSError`.
    """
    files = RunFiles(path)
    origin = read_origin(files.model)
    step = origin.checkpoint.step if origin else Run(path).result.get("steps", "unknown")
    files.summary.unlink(missing_ok=True)
    if files.model.is_dir():
        earlier = files.model.with_name(f"model-step_{step}")
        shutil.rmtree(earlier, ignore_errors=True)
        files.model.rename(earlier)
        if step == first_step:
            shutil.rmtree(earlier)


def _write_config(path: Path, config: TelescopeConfig) -> None:
    replace_file(RunFiles(path).config, dump_yaml(config.values).encode())
