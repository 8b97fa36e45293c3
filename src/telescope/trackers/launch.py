"""Starts and ends the process that copies a run to its trackers (W&B, TensorBoard, trackio), and shows its messages.

    driver -- recorder --> run directory --> `python -m telescope.trackers.process` --> trackers

The first line of the process's stdin describes the run. Stdin closes when the record is complete, and with the driver.

Invariants: the run never waits for a tracker, except in `close`, which ends the process within its timeout. Every
failure is reported once, and the run continues.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.cluster.reaper import MARK_VARIABLE
from telescope.record.files import RunFiles
from telescope.record.run_info import read_run_json
from telescope.trackers.base import TITLES, TrackedRun
from telescope.trackers.wandb import wandb_mode
from telescope.utils.child_guard import kill_group
from telescope.utils.packages import is_installed
from telescope.utils.process import sigterm_blocked

if TYPE_CHECKING:
    from telescope.config import TelescopeConfig

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
"""Time for the last uploads at the end of a run."""


class TrackerProcess:
    """Runs the trackers' process for a run whose record in `run_dir` has begun. Does nothing without trackers.

    `evals` has entity, project, run_id, record and evals of a `TrackedRun`: only these evals are copied, to that W&B
    run, which must exist.
    """

    def __init__(self, config: TelescopeConfig, run_dir: Path, evals: Mapping[str, Any] | None = None) -> None:
        self._files = RunFiles(run_dir)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_described = threading.Event()
        self._is_killed = False
        self.tell = lambda message: None
        """Shows a warning to the user. Called from any thread."""
        self.notice: str | None = None
        """Message for the user at the start of the run, or None."""
        self.mode = "disabled"
        """How W&B is used: `online`, `offline` or `disabled`."""
        self.names = ["wandb"] if evals else list(config.tracker_names)
        """Names of the trackers in use."""
        asked, off = "use_wandb is true", "set use_wandb to false"
        if evals:
            asked, off = "wandb_run_path is set", "leave it out"
        elif config.trackers is not None:
            asked, off = "trackers has wandb", "remove it there"
        if "wandb" in self.names and not self._choose_mode(asked, off):
            self.names.remove("wandb")
        self._titles = ", ".join(TITLES[name] for name in self.names)
        if not self.names:
            return
        run: dict[str, Any] = {"trackers": self.names, "wandb_mode": self.mode, "resume": "allow"}
        run |= {"directory": str(run_dir.resolve()), "interval": config.event_upload_interval_seconds}
        if evals:
            run |= {"resume": "must" if self.mode == "online" else "allow", **evals}
        elif info := read_run_json(run_dir):
            names = ("run_id", "attempt", "started_at", "name", "project", "tags")
            run |= {name: getattr(info, name) for name in names}
            run["config"] = json.loads(config.to_json())["values"]
            uploads = {
                "record": config.wandb_upload_record,
                "code": config.wandb_upload_code,
                "logs": config.wandb_upload_logs,
                "logs_detailed": config.wandb_upload_logs_detailed,
                "logs_stdout": config.wandb_upload_logs_stdout,
            }
            run["uploads"] = [kind for kind, is_chosen in uploads.items() if is_chosen]
        try:
            self._process = self._start()
        except OSError as error:
            self._notify(logging.WARNING, f"Trackers cannot be started; the run continues: {error}")
            return
        first = json.dumps(asdict(TrackedRun(**run)), default=str).encode() + b"\n"
        self._thread = threading.Thread(target=self._follow, args=(self._process, first), daemon=True)
        self._thread.start()

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Lets trackers finish for at most `timeout` seconds, then terminates them. May be called again."""
        if self._process is None or self._process.stdin is None or self._is_killed:
            return
        if self._is_described.wait(timeout):
            self._process.stdin.close()
            self._thread.join(timeout)
        if self._thread.is_alive():
            self._is_killed = True
            sync = f" `wandb sync` uploads what is in {self._files.wandb}." if "wandb" in self.names else ""
            self._warn(f"{self._titles} did not finish in {timeout:g} s and was ended.{sync}")
            kill_group(self._process.pid)

    def _choose_mode(self, asked: str, off: str) -> bool:
        """Returns whether W&B is used, and sets `mode` and `notice`. `asked` and `off` say why, and how to avoid it."""
        mode = wandb_mode(os.environ)
        if mode != "disabled" and not is_installed("wandb"):
            self._notify(logging.WARNING, f"{asked}, but W&B is not installed: pip install wandb, or {off}.")
            return False
        self.mode = mode
        if mode == "offline" and not os.environ.get("WANDB_MODE"):
            fix = f"Run `wandb login` and then `wandb sync` to upload it, or {off}."
            problem = f"{asked}, but there are no W&B credentials"
            self._notify(logging.INFO, f"{problem}: the run is recorded offline in {self._files.wandb}. {fix}")
        return mode != "disabled"

    def _notify(self, level: int, notice: str) -> None:
        self.notice = notice
        logger.log(level, "%s", notice)

    def _warn(self, message: str) -> None:
        logger.warning(message)
        self.tell(message)

    def _start(self) -> subprocess.Popen[bytes]:
        self._files.logs.mkdir(parents=True, exist_ok=True)
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "WANDB_SILENT": "true", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # Without the mark, the reaper of a killed driver lets this process send what is recorded. The reaper removes
        # the run's TMPDIR, so this process uses the folder above.
        if temporary := environment.pop(MARK_VARIABLE, None):
            environment["TMPDIR"] = str(Path(temporary).parent)
        # Ctrl-C and a scheduler's SIGTERM must only reach the run, which then closes this process.
        with self._files.log("trackers").open("ab") as log, sigterm_blocked():
            return subprocess.Popen(
                [sys.executable, "-m", "telescope.trackers.process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, bufsize=0, env=environment, cwd=self._files.run_dir, start_new_session=True,
            )  # fmt: skip

    def _follow(self, process: subprocess.Popen[bytes], first: bytes) -> None:
        """Forwards the process's messages, level and text per line, until it exits. Runs in its own thread."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has exited, which is reported below
            process.stdin.write(first)
        self._is_described.set()
        with process.stdout as lines:
            for line in lines:
                level, _, message = line.decode(errors="replace").strip().partition(" ")
                (logger.info if level == "INFO" else self._warn)(message)
        status = process.wait()
        if status != 0 and not self._is_killed:
            log = self._files.log("trackers")
            self._warn(f"The process of {self._titles} exited with status {status}; the run continues. See {log}.")
