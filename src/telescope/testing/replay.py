"""Replays a recorded run: writes its rows again with the recorder of real runs, as if they happened now.

    recording/RUN/TABLE.parquet --> Replay --> Recorder

`scripts/record_demo.py` trains and packs the recordings. Their times begin at 0, when the run started. After the last
recorded step, the last steps are repeated with other step numbers, times and ids, so a replay can have any length.
Alerts and log lines are not repeated, because their texts name steps.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from telescope.record.files import replace_json
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run, end_run, write_run_json
from telescope.record.tables import TABLES

RECORDING = Path(__file__).parent / "recording"
NOTE = "This run is a recording that is replayed: a model of a million parameters was trained on two CPU cores."

NUM_REPEATED = 10
"""Steps at the end of a recording that are repeated. A multiple of the steps between two evals."""

GROUP_IDS = 10**4
"""Distance of the group ids of two repetitions."""

STEPS = ("step", "version", "start_version", "end_version")
TIMES = ("time", "start", "end", "started_at", "ended_at", "opened_at", "generated_at", "finished_at")
IDS = ("sample_id", "eval_id")
ONCE = {"runs", "attempts"}
"""Tables that are written only at the start and the end of a run."""

DUE = ("due", "ended_at", "end", "time")
"""Columns with the time at which rows are written. The first that a table has counts. Only recordings have `due`."""

IN_FLIGHT = ("sample_id", "group_id", "sample_index", "environment", "prompt_tokens", "started_at", "server", "lane")


def shift(rows: pa.Table, steps: int, seconds: float, copy: int = 0) -> pa.Table:
    """Returns rows with later steps and times. Each `copy` but 0 has other ids of samples, groups and evals."""
    for place, name in enumerate(rows.column_names):
        column = rows[name]
        if name in STEPS:
            column = pc.add(column, steps)
        elif name in TIMES:
            column = pc.add(column, seconds)
        elif name in IDS and copy:
            column = pc.binary_join_element_wise(f"{copy}x", column, "")
        elif name == "group_id":
            distance = copy * GROUP_IDS
            column = pc.add(column, pc.if_else(pc.less(column, 0), -distance, distance))  # negative ids belong to evals
        else:
            continue
        rows = rows.set_column(place, name, column.cast(rows.schema.field(name).type))
    return rows


class Replay:
    """Writes a recorded run again. Use it as a context manager, and call `end` first unless the run stays live.

    `num_steps` is the number of steps that the run claims to train. `origin` is the Unix time of the start; by default
    `num_ended` steps, or all, have ended by now.
    """

    def __init__(
        self, run_dir: Path, recording: str = "demo", *, num_steps: int | None = None, num_ended: int | None = None,
        origin: float | None = None,
    ) -> None:  # fmt: skip
        folder = RECORDING / recording
        self._recorded = json.loads((folder / "run.json").read_text())
        files = {name: folder / f"{name}.parquet" for name in TABLES if name not in ONCE}
        self._tables = {name: pq.read_table(path) for name, path in files.items() if path.exists()}
        self._ends: list[float] = self._tables["steps"]["ended_at"].to_pylist()
        self.num_recorded = len(self._ends)
        self._repeated = min(NUM_REPEATED, self.num_recorded - 1)
        self._period = self._ends[-1] - self._ends[-1 - self._repeated]
        self.num_steps = self._recorded["info"]["num_steps"] if num_steps is None else num_steps
        self.origin = 0.0
        begin = time.time() - self.step_end((num_ended or self.num_steps) - 1) if origin is None else origin
        self.origin = float(int(begin))  # so that its sum with a recorded time is exact
        self._config = self._recorded["config"]
        self._config["values"] |= {
            "run_dir": str(run_dir), "wandb_run_name": run_dir.name, "number_of_steps": self.num_steps,
        }  # fmt: skip
        self._written, self._repetition = -np.inf, 0
        self.step = 0
        """The next step."""
        self._now: dict[str, Any] = {"phase": "starting", "step": 0, "num_steps": self.num_steps}
        self.recorder = Recorder(run_dir, max_pending_rows=10**6, max_pending_bytes=2**31)
        shutil.copytree(folder / "model", self.recorder.files.model, dirs_exist_ok=True)
        info, attempt = self._recorded["info"], self._recorded["attempt"]
        begun = begin_run(
            self.recorder, name=run_dir.name, config_hash=info["config_hash"], config_json=json.dumps(self._config),
            project=info["project"], tags=info["tags"], first_step=0, num_steps=self.num_steps, started_at=self.origin,
            attempt=attempt | {"started_at": self.origin, "notes": [NOTE, *attempt["notes"]]},
        )  # fmt: skip
        self._info = replace(begun, heldout_before=info["heldout_before"])
        write_run_json(run_dir, self._info)
        self.recorder.now = lambda: dict(self._now)

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exception: object) -> None:
        self.recorder.close()

    def step_end(self, step: int) -> float:
        """Returns the Unix time at which a step ends."""
        times = 0
        if step >= self.num_recorded:
            times = 1 + (step - self.num_recorded) // self._repeated
            step -= times * self._repeated
        return self._ends[step] + times * self._period + self.origin

    def write_all(self) -> None:
        """Writes all steps and the end. A recorded failure is not repeated."""
        failed = self._recorded["info"]["status"] == "failed"
        self.write_step((min(self.num_steps, self.num_recorded) if failed else self.num_steps) - 1)
        self.end()

    def write_step(self, step: int) -> None:
        """Writes everything up to the end of a step."""
        self.write_until(self.step_end(step))

    def write_until(self, until: float) -> None:
        """Writes the rows up to a time, and the run's current state."""
        until = max(until, self._written)
        while True:
            times, seconds = self._repetition, self._repetition * self._period + self.origin
            after, shifted = self._written - seconds, (times * self._repeated, seconds, times)
            self._written = min(until, self._ends[-1] + seconds)
            for *_, name, row in self._rows(after, self._written - seconds, *shifted):
                self.recorder.write(name, row)
                self.step += name == "steps"
            if self._written == until:
                return self._describe(until - seconds, *shifted)
            self._repetition += 1

    def end(self, error: str | None = None) -> None:
        """Writes the end of the run: the recorded rows after the last step, and the recorded status or an `error`."""
        end = self.step_end(self.step - 1) if self.step else self.origin
        if error is None:
            last = self._ends[-1]
            for due, _, name, row in self._rows(last, np.inf, self.step - self.num_recorded, end - last):
                self.recorder.write(name, row)
                end = max(end, due)
        status, error = ("failed", error) if error else (self._recorded["info"][name] for name in ("status", "error"))
        replace_json(self.recorder.files.summary, self._recorded["summary"] | {"status": status, "steps": self.step})
        end_run(self.recorder, self._info, status, config_json=json.dumps(self._config), error=error, ended_at=end)

    def _rows(self, after: float, until: float, steps: int, seconds: float, copy: int = 0) -> list[Any]:
        """Returns the rows recorded in a span of time, shifted and in the order of writing."""
        found = []
        for place, (name, rows) in enumerate(self._tables.items()):
            if copy and name in ("alerts", "logs"):
                continue
            due = rows[next(key for key in DUE if key in rows.column_names)].to_numpy()
            chosen = (due > after) & (due <= until)
            columns = [column for column in rows.column_names if column != "due"]
            listed = shift(rows.select(columns).filter(pa.array(chosen)), steps, seconds, copy).to_pylist()
            maps = [field.name for field in rows.schema if pa.types.is_map(field.type)]
            for time_, row in zip((due[chosen] + seconds).tolist(), listed, strict=True):
                row |= {key: dict(row[key]) for key in maps if row[key] is not None}
                found.append((time_, place, name, row))
        return sorted(found, key=lambda row: row[:2])

    def _describe(self, now: float, *shifted: Any) -> None:
        """Sets the run's current state: samples in flight, phase and speed."""
        begun, ended, samples = pc.field("started_at"), pc.field("finished_at"), self._tables["samples"]
        running = shift(samples.filter((begun <= now) & (ended > now)), *shifted)
        self.recorder.set_in_flight(running.select(IN_FLIGHT).to_pylist())
        recent = samples.filter((ended > now - 10) & (ended <= now))
        of_batch = (pc.field("status") == "kept") & (pc.field("step") == self.step - shifted[0])
        values = self._config["values"]
        servers = range(values["inference_num_workers"])
        num_slots = len(servers) * values["max_concurrent_prompts_per_server"] * values["group_size"]
        self._now |= {
            "phase": "training", "step": self.step, "version": self.step,
            "num_generating": min(running.num_rows, num_slots), "num_slots": num_slots,
            "num_open_groups": len(pc.unique(running["group_id"])),
            "num_finished_groups": self._tables["groups"].filter(of_batch & (ended <= now)).num_rows,
            "tokens_per_second": (pc.sum(recent["completion_tokens"]).as_py() or 0) / 10,
            "seconds_left": max(0, self.num_steps - self.step) * self._period / self._repeated,
            "components": {"trainer": f"training step {self.step}", **{f"server {one}": "serving" for one in servers}},
        }  # fmt: skip
