"""Runs GPU tests and benchmarks in order of value within a time limit; writes one JSON report.

    python scripts/gpu_suite.py --json results.json --minutes 10
    python scripts/gpu_suite.py --json results.json --only experts "four ranks"    these, in this order
    python scripts/gpu_suite.py --list                    the parts, their needs and durations

Each part is a separate process with a deadline and its own GPUs; parts whose GPUs are free run side by side. Parts that
need more GPUs than exist, or more time than is left, are skipped and reported. Results are written before and after
every part, so a lost machine costs only the running parts, and their names and start times remain ("running"). Ctrl-C
or SIGTERM ends what runs, and the report marks it ("interrupted"). Exit code 1 when a part failed, or none ran.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY / "benchmarks")]

# These import nothing that must be installed.
from gpu_parts import PARTS, RUN, Part  # noqa: E402
from measure import gpu_names, sources  # noqa: E402

MEASURED = ("src", "benchmarks/*.py", "scripts", "tests")
"""Paths to which the commit in the report refers."""
TAIL_LINES = {"passed": 15, "failed": 150}
"""Lines of a failed part: the traceback of a test, then the end of its server's log."""
LONGEST_TEXT = 2000
"""Characters that the report keeps of results that are not JSON."""
FIRST_PORT = 8200
POLL_SECONDS = 0.5
ENDINGS = ((signal.SIGINT, 30.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))
"""Signals for a part whose time is over, and the seconds to exit after each, since it must end what it started."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu_suite.json"), help="where the results go")
    parser.add_argument("--minutes", type=float, default=30.0, help="start no part that may exceed this time")
    parser.add_argument(
        "--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART", help="only these, in this order"
    )
    parser.add_argument("--folder", type=Path, help="keep output and results of the parts here (default: nowhere)")
    parser.add_argument("--list", action="store_true", help="print the parts and exit")
    arguments = parser.parse_args()
    if arguments.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--list | head`
        for part in PARTS:
            print(f"{part.name:28} {part.num_gpus} GPU(s), up to {part.seconds} s: {part.command}")
        return 0
    if not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json is {arguments.json}, whose folder does not exist: create it, or name another file")
    by_name = {part.name: part for part in PARTS}
    parts = [by_name[name] for name in dict.fromkeys(arguments.only or by_name)]
    if not arguments.minutes > 0:
        parser.error(f"--minutes is {arguments.minutes:g}: use a number above 0")
    gpus = gpu_names()
    if not gpus:
        parser.error("no GPU was found: nvidia-smi is missing, or lists none")
    report: dict[str, Any] = {"gpus": gpus, "started": utc_now(), **sources(*MEASURED)}
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as temporary:
        folder = arguments.folder or Path(temporary)
        suite = Suite(parts, gpu_ids(len(gpus)), folder, arguments.minutes * 60)

        def note(part: Part, result: dict[str, Any]) -> None:
            found[part.name] = asdict(part) | result
            write_atomically(arguments.json, json.dumps(report | {"parts": list(found.values())}, indent=1) + "\n")
            took = f" ({result['took']:.0f} s)" if "took" in result else ""
            print(f"{part.name}: {result['outcome']}{took}", flush=True)
            if result["outcome"] == "failed":
                print(*result["tail"], sep="\n", flush=True)

        with ended_by_signals(suite):
            try:
                for part, result in suite.results():
                    note(part, result)
            finally:
                for part, result in suite.stop():
                    note(part, result)
    if suite.ended_by is not None:
        return 128 + suite.ended_by
    outcomes = [part["outcome"] for part in found.values()]
    if "passed" not in outcomes and "failed" not in outcomes:
        print("no part ran", file=sys.stderr)
        return 1
    return int("failed" in outcomes)


@contextmanager
def ended_by_signals(suite: Suite) -> Iterator[None]:
    """Ends the suite at the first Ctrl-C or SIGTERM, between two of its steps: an exception could come between the
    start of a part and its registration. Parts have their own sessions, and would outlive this process on their GPUs.
    """

    def end(number: int, frame: FrameType | None) -> None:
        suite.ended_by = number
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def utc_now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def write_atomically(path: Path, text: str) -> None:
    """Writes a file atomically: a concurrent reader sees the old text or the new one."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text)
    partial.replace(path)


def gpu_ids(count: int) -> list[str]:
    """Returns the GPUs of CUDA_VISIBLE_DEVICES, or all of the machine's when it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(index) for index in range(count)] if visible is None else [name for name in visible.split(",") if name]


class Suite:
    """Runs parts in order, each as soon as there are GPUs for it.

    While a part waits for GPUs, later and smaller parts may run first if their deadlines come before those of the parts
    that it waits for.
    """

    def __init__(self, parts: Sequence[Part], gpus: Sequence[str], folder: Path, seconds: float) -> None:
        self._waiting = list(parts)
        self._num_gpus = len(gpus)
        self._free = list(gpus)
        self._folder = folder
        self._ends = time.monotonic() + seconds
        self._running: list[Running] = []
        self._num_started = 0
        self.ended_by: int | None = None
        """The signal after which no part starts and `results` ends."""

    def results(self) -> Iterator[tuple[Part, dict[str, Any]]]:
        """Yields each part with its result as it ends, and before its start with the outcome "running"."""
        while self.ended_by is None and (self._waiting or self._running):
            for part in list(self._waiting):
                reason = why_not(part, self._num_gpus, self._ends - time.monotonic())
                if reason is not None:
                    self._waiting.remove(part)
                    yield part, reason
            yield from self._start_what_fits()
            for running in [running for running in self._running if running.is_over()]:
                self._running.remove(running)
                self._free = sorted([*self._free, *running.gpus])
                yield running.part, running.result()
            if self._running:
                time.sleep(POLL_SECONDS)

    def _start_what_fits(self) -> Iterator[tuple[Part, dict[str, Any]]]:
        before = float("inf")
        for part in list(self._waiting):
            if self.ended_by is not None:
                return
            if part.num_gpus <= len(self._free) and time.monotonic() + part.seconds <= before:
                self._waiting.remove(part)
                gpus, self._free = self._free[: part.num_gpus], self._free[part.num_gpus :]
                yield part, {"outcome": "running", "since": utc_now(), "on_gpus": gpus}
                folder = self._folder / part.name.replace(" ", "-")
                folder.mkdir(parents=True, exist_ok=True)
                port = FIRST_PORT + 10 * self._num_started
                self._num_started += 1
                self._running.append(Running(part, gpus, folder, port))
            elif part.num_gpus > len(self._free):
                before = min(before, max(running.deadline for running in self._running))

    def stop(self) -> list[tuple[Part, dict[str, Any]]]:
        """Ends running parts. Returns their results, with the outcome "interrupted"."""
        stopped, self._running = self._running, []
        end_parts(stopped)
        return [(running.part, running.result() | {"outcome": "interrupted"}) for running in stopped]


class Running:
    """A part running on `gpus`. `results` of its result is the content of its results file."""

    def __init__(self, part: Part, gpus: Sequence[str], folder: Path, port: int) -> None:
        self.part = part
        self.gpus = gpus
        self._results, self._output = folder / part.results, folder / "output.txt"
        self._results.unlink(missing_ok=True)
        words = {"json": self._results, "folder": folder, "tiny": folder / "tiny", "port": port}
        self._started = time.monotonic()
        self.deadline = self._started + part.seconds
        command = part.command.format(**words)
        if "{tiny}" in part.command:
            command = f"{RUN} tiny-model --output {words['tiny']} {part.tiny} && exec {command}"
        with self._output.open("w") as sink:
            self.process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=REPOSITORY,
                env=environment(gpus),
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=restore_interrupts,
            )

    def is_over(self) -> bool:
        """Returns whether it has ended; ends it when its time is over."""
        if self.process.poll() is None and time.monotonic() > self.deadline:
            end_parts([self])
        return self.process.poll() is not None

    def result(self) -> dict[str, Any]:
        """Returns the result."""
        took = time.monotonic() - self._started
        code = self.process.returncode
        outcome = "passed" if code == 0 else "failed"
        return {
            "outcome": outcome,
            "exit_code": code,
            "on_gpus": list(self.gpus),
            "took": round(took, 1),
            "ran_out_of_time": took >= self.part.seconds,
            "tail": self._output.read_text(errors="replace").splitlines()[-TAIL_LINES[outcome] :],
            "results": self._read_results(),
        }

    def _read_results(self) -> Any:
        """Returns what it wrote, or None. A file cut off by a kill must not fail the other parts."""
        if not self._results.exists():
            return None
        text = self._results.read_text(errors="replace")
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            return {"not_json": str(error), "text": text[:LONGEST_TEXT]}


def restore_interrupts() -> None:
    """Restores SIGINT in a part before its command: background processes of a script ignore it otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_parts(parts: Sequence[Running]) -> None:
    """Ends parts with everything that they started, all at once, within the times of `ENDINGS`."""
    for number, seconds in ENDINGS:
        alive = [part.process for part in parts if part.process.poll() is None]
        for process in alive:
            os.killpg(process.pid, number)
        deadline = time.monotonic() + seconds
        for process in alive:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    for part in parts:
        with suppress(ProcessLookupError):
            os.killpg(part.process.pid, signal.SIGKILL)  # the rest of its group


def why_not(part: Part, num_gpus: int, seconds_left: float) -> dict[str, Any] | None:
    """Returns the result of a part that cannot run here, or None."""
    if part.num_gpus > num_gpus:
        return {"outcome": f"skipped: needs {part.num_gpus} GPUs, this machine has {num_gpus}"}
    if part.seconds > seconds_left:
        return {"outcome": f"skipped: may take {part.seconds} s, {max(seconds_left, 0):.0f} s are left"}
    return None


def environment(gpus: Sequence[str]) -> dict[str, str]:
    """Returns this process's environment with this checkout's sources first, and only those GPUs."""
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}


if __name__ == "__main__":
    sys.exit(main())
