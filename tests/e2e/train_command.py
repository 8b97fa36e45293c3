"""`train.py` in a process of its own, as a person runs it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from telescope.record.reader import Run

ROOT = Path(__file__).parents[2]
MARK = "TELESCOPE_TEST_MARK"
"""An environment variable that every process of a run inherits, so that none can be left behind unseen."""


def steps_of(run: Run) -> list[dict[str, Any]]:
    """Returns the rows of a run's steps in order."""
    rows = run.table("steps").to_pylist(maps_as_pydicts="strict")
    return sorted(rows, key=lambda row: row["step"])


class Command:
    """A running `train.py` on a demo's config, with all processes below it; leaving the context kills it."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        port: int,
        *flags: str,
        number_of_steps: int = 500,
        resume: bool = False,
        config: str = "demo_countdown.yaml",
        within: Sequence[str] = (),
    ) -> None:
        self.run_dir = folder / "run"
        self.log = folder / "output.txt"
        self.mark = uuid.uuid4().hex
        self.known: dict[int, str] = {}
        """Every process of the family that was ever seen, by its id, with its start time."""
        command = [*within, sys.executable, str(ROOT / "train.py")]
        if resume:
            command += ["--resume", str(self.run_dir)]
        else:
            command += ["--config", str(ROOT / "configs" / "examples" / config), f"--model={model}"]
            command += [f"--run_dir={self.run_dir}", f"--inference_base_port={port}"]
            command += ["--use_wandb=false", "--eval_before_training=false"]
        command += [f"--number_of_steps={number_of_steps}", *flags]
        environment = {**os.environ, MARK: self.mark}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()

    def finish(self, seconds: float = 600) -> Run:
        """Waits for an end without an error. Returns the record of the run."""
        with self:
            assert self.process.wait(timeout=seconds) == 0, self.log.read_text()[-3000:]
        return Run(self.run_dir)

    def leaves_no_process(self) -> None:
        """Waits until every process of it has ended."""
        self.process.wait(timeout=30)
        self.wait_for("end of every process", lambda: not self.family(), 60)

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            state = f"processes: {self.family()}; output:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"no {what} within {seconds:g} s; {state}"
            time.sleep(0.2)

    def printed(self, text: str) -> Callable[[], bool]:
        def is_printed() -> bool:
            assert self.process.poll() is None, f"the command ended early:\n{self.log.read_text()[-3000:]}"
            return text in self.log.read_text()

        return is_printed

    def family(self) -> list[str]:
        """Command lines of all processes that carry the mark, or descend from one that does or did."""
        alive: dict[int, tuple[int, str, bool, str]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state, parent, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
                marked = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                if state not in "ZX":
                    line = (entry / "cmdline").read_text().replace("\0", " ")[:120]
                    alive[int(entry.name)] = int(parent), rest[17], marked, line
            except OSError:
                continue  # it has just ended
        self.known = {pid: start for pid, start in self.known.items() if pid in alive and alive[pid][1] == start}
        num_known = -1
        while num_known != len(self.known):
            num_known = len(self.known)
            self.known |= {
                p: start for p, (parent, start, marked, _) in alive.items() if marked or parent in self.known
            }
        return [alive[pid][3] for pid in self.known]

    def listens_on(self) -> set[str]:
        """The addresses on which processes of the family take TCP connections."""
        self.family()
        found = set()
        for pid in self.known:
            try:
                connections = psutil.Process(pid).net_connections("tcp")
            except psutil.NoSuchProcess:
                continue
            found |= {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN}
        return found

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def terminate_all(self) -> None:
        """Sends SIGTERM to the process, to its group, and to each process of the family, as schedulers do."""
        self.process.terminate()
        os.killpg(self.process.pid, signal.SIGTERM)
        self.family()
        for pid in self.known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
