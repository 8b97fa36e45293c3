"""Sends step metrics to Weights & Biases through a separate process.

    log_step -> queue (bounded) -> thread -> pipe -> `python -m telescope.record.wandb_process` -> wandb

Owns that process, and the choice between online and offline. W&B gets a copy of the record; when it is missing, slow or
broken, the run only warns. All attempts of a run are one run of W&B, whose id is that in `run.json`.

Invariants: `log_step` returns at once. Every failure is reported once. `close` ends the process within its timeout.
W&B has each step once: `wandb_process` leaves out steps that an earlier attempt has sent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import netrc
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from telescope.record.files import RunFiles
from telescope.record.run_info import read_run_json

if TYPE_CHECKING:
    from telescope.config import TelescopeConfig

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Messages that wait for W&B at most. Later ones are dropped and counted."""

_DEFAULT_URL = "https://api.wandb.ai"


def has_credentials(environment: Mapping[str, str]) -> bool:
    """Returns whether W&B would find a key, in the environment or netrc."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path(environment.get("HOME", "~")).expanduser()
    candidates = [Path(environment["NETRC"])] if environment.get("NETRC") else [home / ".netrc", home / "_netrc"]
    host = urlparse(environment.get("WANDB_BASE_URL") or _DEFAULT_URL).hostname or ""
    for path in candidates:
        try:
            if netrc.netrc(str(path.expanduser())).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def wandb_mode(environment: Mapping[str, str]) -> str:
    """Returns `online`, `offline` or `disabled`: `WANDB_MODE`, else online if there are credentials."""
    asked = environment.get("WANDB_MODE", "").strip().lower()
    if asked in ("online", "offline", "disabled"):
        return asked
    return "online" if has_credentials(environment) else "offline"


class WandbSink:
    """Copies step metrics to W&B. Does nothing if `use_wandb` is false, W&B is missing, or `WANDB_MODE=disabled`.

    With `run_path` (entity/project/run_id) they go to that run of W&B, which must exist.
    """

    def __init__(self, config: TelescopeConfig, run_dir: Path | str, *, run_path: str | None = None) -> None:
        self._run_path = run_path
        self._files = RunFiles(run_dir)
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_dropped = 0
        self._closing = False
        self._killed = False
        self._finished = threading.Event()
        self._threads: list[threading.Thread] = []
        self.notice: str | None = None
        """Message for the user at the start of the run, or None."""
        self.mode = wandb_mode(os.environ) if config.use_wandb or run_path else "disabled"
        if self.mode == "disabled":
            return
        if not _is_installed():
            self.mode = "disabled"
            self._notify("use_wandb is true, but W&B is not installed: pip install wandb, or set use_wandb to false.")
            return
        if self.mode == "offline" and not os.environ.get("WANDB_MODE"):
            self._notify(
                f"use_wandb is true, but there are no W&B credentials: the run is recorded offline in "
                f"{self._files.wandb}. Run `wandb login` and then `wandb sync` to upload it, or set use_wandb to false."
            )
        self._queue.put_nowait(self._first_message(config))
        self._threads = [threading.Thread(target=self._feed, name="telescope-wandb", daemon=True)]
        self._threads[0].start()

    def _notify(self, notice: str) -> None:
        self.notice = notice
        logger.warning("%s", notice)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step. Returns at once."""
        self._put({"kind": "step", "step": step, "metrics": dict(metrics)})

    def fill_in(self, before: int) -> None:
        """Sends recorded steps before `before` that W&B lacks after a kill.

        Returns at once. Does nothing offline, where missing steps are not known.
        """
        if self.mode == "online":
            self._put({"kind": "fill in", "before": before})

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Sets values of the run's summary. Returns at once."""
        self._put({"kind": "summary", "values": dict(values)})

    def close(self, timeout: float = 30.0) -> None:
        """Lets W&B finish for at most `timeout` seconds, then ends it. May be called again."""
        if not self._threads or self._closing:
            return
        self._closing = True
        if self._num_dropped:
            logger.warning("W&B was too slow for %d messages; the record has all of them.", self._num_dropped)
        self._put_end()
        if not self._finished.wait(timeout):
            logger.warning(
                "W&B did not finish in %g s and was ended. `wandb sync` uploads what is in %s.",
                timeout,
                self._files.wandb,
            )
            self._kill()

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

    def _first_message(self, config: TelescopeConfig) -> dict[str, Any]:
        common = {"kind": "init", "mode": self.mode, "directory": str(self._files.run_dir.resolve())}
        if self._run_path is not None:
            entity, project, run_id = self._run_path.split("/")
            resume = "must" if self.mode == "online" else "allow"
            return {**common, "entity": entity, "project": project, "id": run_id, "resume": resume, "last_step": None}
        info = read_run_json(self._files.run_dir)
        steps = [] if info is None else self._recorded_steps(["step"], all_attempts=True)
        return {
            **common,
            "project": config.wandb_project,
            "name": config.wandb_run_name,
            "tags": list(config.wandb_tags),
            "id": info.run_id if info else None,
            "resume": "allow" if info else None,
            "last_step": max((row["step"] for row in steps), default=None),
            "config": json.loads(config.to_json()),
        }

    def _recorded_steps(self, columns: list[str], **options: Any) -> list[dict[str, Any]]:
        from telescope.record.reader import Run

        return Run(self._files.run_dir).table("steps", columns=columns, **options).to_pylist()

    # The methods below run in the sink's own thread.

    def _feed(self) -> None:
        """Starts the process, sends it the messages, and waits for its end."""
        try:
            process = self._process = self._start()
            listener = threading.Thread(target=self._listen, args=(process,), name="telescope-wandb-out", daemon=True)
            listener.start()
            self._send(process)
            status = process.wait()
            listener.join(1.0)
            if status != 0 and not self._killed:
                logger.warning(
                    "W&B exited with status %d; the run continues. See %s.", status, self._files.log("wandb")
                )
        except OSError as error:
            logger.warning("W&B cannot be started; the run continues: %s", error)
        finally:
            self._finished.set()

    def _start(self) -> subprocess.Popen[bytes]:
        self._files.logs.mkdir(parents=True, exist_ok=True)
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "WANDB_SILENT": "true", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with self._files.log("wandb").open("ab") as log:
            # Its own session: Ctrl-C is for the run, which then closes this sink.
            return subprocess.Popen(
                [sys.executable, "-m", "telescope.record.wandb_process"],
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
                    for each in self._missing(message["before"]) if message["kind"] == "fill in" else [message]:
                        pipe.write(json.dumps(each, default=str).encode() + b"\n")
                    pipe.flush()
        except BrokenPipeError:
            return  # The process ended; `_feed` reports its status.

    def _missing(self, before: int) -> list[dict[str, Any]]:
        rows = self._recorded_steps(["step", "metrics"])
        return [
            {"kind": "step", "step": row["step"], "metrics": dict(row["metrics"] or ())}
            for row in rows
            if row["step"] < before
        ]

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Logs the messages of the process: per line, JSON with `level` and `message`."""
        assert process.stdout is not None
        with process.stdout as pipe:
            for line in pipe:
                entry = json.loads(line)
                logger.log(logging.getLevelNamesMapping().get(entry["level"], logging.WARNING), "%s", entry["message"])
        self._put_end()  # If the process exited by itself, the feeding thread stops now and not at the next step.

    def _kill(self) -> None:
        process = self._process
        self._killed = True
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _is_installed() -> bool:
    """Returns whether the package is installed. W&B's own folder `wandb/` is not the package."""
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None
