"""Sends the numbers of a run to its trackers (W&B, TensorBoard, trackio) through one process beside it.

    log_step -> queue (bounded) -> thread -> pipe -> `python -m telescope.trackers.process` -> trackers
                                                        ^-- record: gauges, files

Owns that process. Trackers get copies of the record; when one is missing, slow or broken, the run only warns.

Invariants: `log_step` returns at once. Every failure is reported once. `close` ends the process within its timeout.
A tracker has each step once: `process` leaves out steps that an earlier attempt has sent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.record.files import RunFiles
from telescope.record.run_info import read_run_json
from telescope.trackers.base import MAX_WAITING, TITLES, TrackedRun
from telescope.trackers.wandb import wandb_mode
from telescope.utils.packages import is_installed
from telescope.utils.process import sigterm_blocked

if TYPE_CHECKING:
    from telescope.config import TelescopeConfig

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
"""Time for the last uploads at the end of a run."""


class TrackerSink:
    """Copies step metrics to the trackers of the config.

    They follow the record in `run_dir` by themselves.

    With `run_path` (entity/project/run_id), metrics go to that run of W&B alone, which must exist.
    """

    def __init__(self, config: TelescopeConfig, run_dir: Path | str, *, run_path: str | None = None) -> None:
        self._files = RunFiles(run_dir)
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_dropped = 0
        self._closing = False
        self._killed = False
        self._finished = threading.Event()
        self._threads: list[threading.Thread] = []
        self.tell: Callable[[str], object] = lambda message: None
        """Shows a warning to the user. Called from any thread."""
        self.notice: str | None = None
        """Message for the user at the start of the run, or None."""
        self.mode = "disabled"
        """How W&B is used: `online`, `offline` or `disabled`."""
        self.names = ["wandb"] if run_path else list(config.tracker_names)
        """Trackers that are used."""
        if "wandb" in self.names and not self._choose_mode():
            self.names.remove("wandb")
        if not self.names:
            return
        if run_path:
            entity, project, run_id = run_path.split("/")
            run = TrackedRun(
                self._directory, project, run_id=run_id, entity=entity, wandb_mode=self.mode,
                resume="must" if self.mode == "online" else "allow",
            )  # fmt: skip
        else:
            run = self._this_run(config)
        self._queue.put_nowait({"trackers": self.names, "run": asdict(run)})
        self._threads = [threading.Thread(target=self._feed, name="telescope-trackers", daemon=True)]
        self._threads[0].start()

    def _choose_mode(self) -> bool:
        """Returns whether W&B is used, and sets `mode` and `notice`."""
        mode = wandb_mode(os.environ)
        if mode == "disabled":
            return False
        if not is_installed("wandb"):
            self._notify(
                logging.WARNING,
                "use_wandb is true, but W&B is not installed: pip install wandb, or set use_wandb to false.",
            )
            return False
        self.mode = mode
        if mode == "offline" and not os.environ.get("WANDB_MODE"):
            self._notify(
                logging.INFO,
                f"use_wandb is true, but there are no W&B credentials: the run is recorded offline in "
                f"{self._files.wandb}. Run `wandb login` and then `wandb sync` to upload it, or set use_wandb to "
                "false.",
            )
        return True

    def _notify(self, level: int, notice: str) -> None:
        self.notice = notice
        logger.log(level, "%s", notice)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step. Returns at once."""
        self._put({"kind": "step", "step": step, "metrics": dict(metrics)})

    def fill_in(self, before: int) -> None:
        """Sends recorded steps before `before` that a tracker lacks after a kill. Returns at once."""
        self._put({"kind": "fill in", "before": before})

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Sends final numbers of the run. Returns at once."""
        self._put({"kind": "summary", "values": dict(values)})

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Lets trackers finish for at most `timeout` seconds, then ends them. May be called again."""
        if not self._threads or self._closing:
            return
        self._closing = True
        if self._num_dropped:
            self._warn(f"Trackers were too slow for {self._num_dropped} messages; the record has all of them.")
        self._put_end()
        if not self._finished.wait(timeout):
            what = ", ".join(TITLES[name] for name in self.names)
            sync = f" `wandb sync` uploads what is in {self._files.wandb}." if "wandb" in self.names else ""
            self._warn(f"{what} did not finish in {timeout:g} s and was ended.{sync}")
            self._kill()

    def _warn(self, message: str) -> None:
        logger.warning("%s", message)
        self.tell(message)

    def _put(self, message: dict[str, Any]) -> None:
        if not self._threads or self._closing or self._finished.is_set():
            return
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._num_dropped += 1

    def _put_end(self) -> None:
        """Makes the feeding thread stop after the waiting messages."""
        if self._queue.full():
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()  # Makes space for the end.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def _this_run(self, config: TelescopeConfig) -> TrackedRun:
        from telescope.record.reader import Run

        info = read_run_json(self._files.run_dir)
        values = json.loads(config.to_json())["values"]
        of_record: dict[str, Any] = {}
        if info is not None:
            of_record = {"run_id": info.run_id, "attempt": info.attempt, "started_at": info.started_at}
            steps = Run(self._files.run_dir).table("steps", columns=["step"], all_attempts=True)["step"].to_pylist()
            of_record |= {"last_step": max(steps, default=None), "resume": "allow", "has_record": True}
        return TrackedRun(
            self._directory, config.wandb_project, name=config.wandb_run_name, tags=list(config.wandb_tags),
            config=values, wandb_mode=self.mode, uploads=config.upload_kinds,
            upload_seconds=config.event_upload_interval_seconds, **of_record,
        )  # fmt: skip

    @property
    def _directory(self) -> str:
        return str(self._files.run_dir.resolve())

    # The methods below run in the sink's own thread.

    def _feed(self) -> None:
        """Starts the process, sends it the messages, and waits for its end."""
        try:
            process = self._process = self._start()
            listener = threading.Thread(
                target=self._listen, args=(process,), name="telescope-trackers-out", daemon=True
            )
            listener.start()
            self._send(process)
            status = process.wait()
            listener.join(1.0)
            if status != 0 and not self._killed:
                what = ", ".join(TITLES[name] for name in self.names)
                log = self._files.log("trackers")
                self._warn(f"The process of {what} exited with status {status}; the run continues. See {log}.")
        except OSError as error:
            self._warn(f"Trackers cannot be started; the run continues: {error}")
        finally:
            self._finished.set()

    def _start(self) -> subprocess.Popen[bytes]:
        self._files.logs.mkdir(parents=True, exist_ok=True)
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "WANDB_SILENT": "true", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # Out of reach of Ctrl-C and of a scheduler's SIGTERM: they are for the run, which then closes this sink.
        with self._files.log("trackers").open("ab") as log, sigterm_blocked():
            return subprocess.Popen(
                [sys.executable, "-m", "telescope.trackers.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=self._files.run_dir,
                start_new_session=True,
            )

    def _send(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        try:
            with process.stdin as pipe:
                while (message := self._queue.get()) is not None:
                    pipe.write(json.dumps(message, default=str).encode() + b"\n")
                    pipe.flush()
        except BrokenPipeError:
            return  # The process ended; `_feed` reports its status.

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Logs the messages of the process: per line, JSON with `level` and `message`."""
        assert process.stdout is not None
        with process.stdout as pipe:
            for line in pipe:
                entry = json.loads(line)
                if entry["level"] == "INFO":
                    logger.info("%s", entry["message"])
                else:
                    self._warn(entry["message"])
        self._put_end()  # If the process exited by itself, the feeding thread stops now and not at the next step.

    def _kill(self) -> None:
        process = self._process
        self._killed = True
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
