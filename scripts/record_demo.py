"""Records the runs that `telescope ui --demo` replays: trains them on this machine's CPU, and packs their records.

    python scripts/record_demo.py                 trains all four, about ten minutes on two cores
    python scripts/record_demo.py --steps 3       a short try
    python scripts/record_demo.py --pack          packs the runs that were trained before

A tiny model learns Countdown and the calculator agent. In the first run, an inference server is killed (the run
restarts it), and later a trainer rank is stopped for some seconds, which delays a step. The second run has a higher
learning rate. In the third, a trainer rank is killed, which ends it. In the fourth, agents play
Countdown. The packed records have no weights, and no name of this machine, its folders or its users.
"""

from __future__ import annotations

import argparse
import getpass
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from telescope.record.reader import Run
from telescope.record.tables import TABLES
from telescope.testing.replay import ONCE, RECORDING, TIMES, shift

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models/tiny-mixed"
RUNS = ROOT / "runs/recording"
NUM_STEPS = 70

COUNTDOWN = {
    "dataset": "generated", "prompt_style": "short", "min_numbers": 3, "max_numbers": 3, "max_number": 10,
    "operations": "+-", "format_reward": 0.0,
}  # fmt: skip
CALCULATOR = {"prompt_style": "short", "max_turns": 4, "max_operations": 2, "max_number": 10}
ENVIRONMENTS = {"countdown": COUNTDOWN, "calculator_agent": CALCULATOR}
PASS_K = {"at_k": {"metrics": ["correct"], "k": [1, 2, 4]}, "pow_k": {"metrics": ["correct"], "k": [2, 4]}}

CONFIG: dict[str, Any] = {
    "model": str(MODEL), "model_dtype": "float32", "mixed_precision_dtype": None, "gradient_checkpointing": False,
    "device": "cpu", "ray_address": "local", "ray_inference_cpus_per_worker": 0.4, "ray_trainer_cpus_per_worker": 0.4,
    "inference_num_workers": 3, "trainer_num_workers": 2, "inference_threads": 1, "trainer_threads": 1,
    "inference_kv_cache_gib": 0.25, "environment_workers": 1, "inference_base_port": 18_300,
    "environments": [
        {"name": name, "reward_min": 0.0, "reward_max": 1.0, "kwargs": {**kwargs, "portion": "train"}}
        for name, kwargs in ENVIRONMENTS.items()
    ],
    "evals": [
        {"name": name, "eval_every": 10, "num_samples": 24, "separate_eval_samples": True, "temperature": 1.0,
         "pass_k": PASS_K, "kwargs": {**kwargs, "portion": "heldout"}}
        for name, kwargs in ENVIRONMENTS.items()
    ],
    "eval_num_servers": 1, "algorithm": "grpo", "learning_rate": 3e-4, "temperature": 1.0, "group_size": 8,
    "prompts_batch_size_for_trainer": 6, "max_concurrent_prompts_per_server": 2, "max_async_rollout": 1,
    "max_tokens": 20, "max_model_len": 192, "seq_len": 1024, "weight_probe_every": 20, "record_tokens": 4,
    "use_wandb": False, "wandb_tags": ["demo"],
    "system_metrics_collection_interval_seconds": 4.0, "torch_memory_sample_interval_seconds": 4.0,
}  # fmt: skip

TICKS_PER_SECOND = 1024.0
"""Times are rounded to 1/1024 s, which compresses well."""

Event = tuple[float, Callable[[int], None]]
"""The share of the steps after which the function is called with the driver's process id."""


def send(sent: signal.Signals, word: str, seconds: float, driver: int) -> None:
    """Sends a signal to the last process of the run with `word` in its command line, and SIGCONT `seconds` later."""
    processes = psutil.Process(driver).children(recursive=True)
    target = [process for process in processes if word in " ".join(process.cmdline())][-1]
    target.send_signal(sent)
    if seconds:
        time.sleep(seconds)
        target.send_signal(signal.SIGCONT)


SERVER, RANK = "vllm.entrypoints", "TrainerActor"
SAVES: dict[str, Any] = {"checkpoint_every": 20, "checkpoint_keep_last": 1}
COMPARED: dict[str, Any] = {"enable_vllm_tracing": False, "record_tokens": 1}
"""Settings of the runs to compare with, whose recordings are smaller."""

AGENTS: dict[str, Any] = {
    "model": str(ROOT / "models/tiny-countdown"), "group_size": 4, "prompts_batch_size_for_trainer": 4, "evals": [],
    "environments": [
        {"name": "agent_countdown", "reward_min": 0.0, "reward_max": 1.0,
         "kwargs": {**{key: value for key, value in COUNTDOWN.items() if key != "prompt_style"}, "agent": agent}}
        for agent in ("checker", "compacting")
    ],
    "max_model_len": 64, "inference_num_workers": 1, "trainer_num_workers": 1, "record_tokens": 4,
    "enable_vllm_tracing": False, "seed": 3,
}  # fmt: skip

RECORDED: dict[str, tuple[dict[str, Any], float, list[Event]]] = {
    "demo": (SAVES, 1.0, [
        (0.13, partial(send, signal.SIGKILL, SERVER, 0.0)), (0.70, partial(send, signal.SIGSTOP, RANK, 15.0)),
    ]),
    "demo-lr-1e-3": ({**COMPARED, "learning_rate": 1e-3, "seed": 1}, 0.4, []),
    "demo-lr-1e-4": (
        {**COMPARED, "learning_rate": 1e-4, "seed": 2}, 0.3, [(0.2, partial(send, signal.SIGKILL, RANK, 0.0))],
    ),
    "demo-agents": (AGENTS, 0.06, []),
}  # fmt: skip
"""Settings, share of the steps, and events of each run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--pack", action="store_true", help="train nothing")
    parser.add_argument("--only", choices=RECORDED, nargs="+", default=list(RECORDED))
    arguments = parser.parse_args()
    telescope = [sys.executable, "-m", "telescope"]
    if not arguments.pack:
        made = ["tiny-model", "--task", "mixed", "--warm-start-steps", "1000", "--output", str(MODEL)]
        for each in (made, ["tiny-model", "--output", AGENTS["model"]]):
            subprocess.run([*telescope, *each], check=True)
    for name in arguments.only:
        if not arguments.pack:
            fields, share, events = RECORDED[name]
            train(
                telescope, name, fields, round(share * arguments.steps), [(s * arguments.steps, e) for s, e in events]
            )
        pack(RUNS / name, RECORDING / name)
    return 0


def train(telescope: list[str], name: str, fields: dict[str, Any], num_steps: int, events: list[Event]) -> None:
    """Trains a run and calls its events."""
    run_dir = RUNS / name
    shutil.rmtree(run_dir, ignore_errors=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    config = RUNS / f"{name}.yaml"
    own = {"number_of_steps": num_steps, "wandb_run_name": name, "run_dir": str(run_dir)}
    config.write_text(yaml.safe_dump({**CONFIG, **fields, **own}))
    with subprocess.Popen([*telescope, "train", "--config", str(config)]) as process:
        while process.poll() is None:
            time.sleep(0.5)
            if events and (run_dir / "tables/steps").is_dir() and Run(run_dir).num_rows("steps") >= events[0][0]:
                events.pop(0)[1](process.pid)


def pack(run_dir: Path, target: Path) -> None:
    """Copies the record of a run: one file per table, without the names of this machine. Times begin at 0."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "model").mkdir(parents=True)
    run = Run(run_dir)
    assert run.info is not None
    model = json.loads(run.table("runs")["config_json"][0].as_py())["values"]["model"]
    for file in ("config.json", "tokenizer.json"):
        shutil.copyfile(Path(model) / file, target / "model" / file)
    tables = {name: without_names(shift(run.table(name), 0, -run.info.started_at)) for name in TABLES}
    written = written_at(tables)
    for name in TABLES.keys() - ONCE:
        rows = tables[name]
        if name in written:
            rows = rows.append_column("due", pa.array(written[name], pa.float64()))
        floats = [field.name for field in rows.schema if pa.types.is_floating(field.type)]
        pq.write_table(
            rows, target / f"{name}.parquet", compression="zstd", compression_level=19, store_schema=False,
            write_statistics=False,
            use_dictionary=[column for column in rows.column_names if column not in (*floats, "sample_id")],
            column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT") | dict.fromkeys(
                {"sample_id"} & {*rows.column_names}, "DELTA_BYTE_ARRAY"),
        )  # fmt: skip
    (attempt,) = tables["attempts"].to_pylist()
    content = {
        "info": {**scrub(asdict(run.info)), "process": {}},
        "attempt": attempt | {name: dict(attempt[name] or ()) for name in ("versions", "topology")} | {"pid": None},
        "config": json.loads(tables["runs"]["config_json"][0].as_py()),
        "summary": scrub(run.result),
    }
    (target / "run.json").write_text(json.dumps(content, indent=1) + "\n")
    sizes = {path.stem: path.stat().st_size // 1024 for path in target.glob("*.parquet")}
    print(f"{target}: {sum(sizes.values())} KiB: {sizes}")


def without_names(rows: pa.Table) -> pa.Table:
    """Returns rows without the names of this machine, and with numbers that compress well."""
    for place, field in enumerate(rows.schema):
        column = rows[field.name]
        if field.name in TIMES:
            column = pc.divide(pc.round(pc.multiply(column, TICKS_PER_SECOND)), TICKS_PER_SECOND)
        elif pa.types.is_floating(field.type):
            column = column.cast(pa.float32()).cast(field.type)
        elif has_text(field.type):
            column = pa.array(scrub(column.to_pylist()), field.type)
        rows = rows.set_column(place, field, column)
    return rows


def written_at(tables: Mapping[str, pa.Table]) -> dict[str, list[float]]:
    """Returns the write times of rows that record none: those of their step, eval or sample."""

    def column(table: str, *names: str) -> list[Any]:
        found = tables[table].select(names).to_pydict().values()
        return list(zip(*found, strict=True)) if len(names) > 1 else list(*found)

    step_ends, eval_ends = dict(column("steps", "step", "ended_at")), dict(column("evals", "eval_id", "ended_at"))
    times: dict[str, list[float]] = {"environments": [0.0] * tables["environments"].num_rows}
    for name in ("samples", "groups"):
        rows = column(name, "status", "step", "finished_at")
        times[name] = [step_ends[step] if status == "kept" else end or 0.0 for status, step, end in rows]
    of_sample = dict(zip(column("samples", "sample_id"), times["samples"], strict=True))
    of_prompt: dict[str, float] = {}
    for key, time_ in zip(column("samples", "prompt_key"), times["samples"], strict=True):
        of_prompt[key] = min(time_, of_prompt.get(key, time_))
    times["prompts"] = [of_prompt.get(key, 0.0) for key in column("prompts", "prompt_key")]
    times["eval_samples"] = [eval_ends[key] for key in column("eval_samples", "eval_id")]
    times["step_stats"] = [step_ends[key] for key in column("step_stats", "step")]
    for name in ("turns", "tool_calls", "info", "tokens"):
        times[name] = [of_sample[key] for key in column(name, "sample_id")]
    return times


def has_text(kind: pa.DataType) -> bool:
    """Returns whether a column has texts, also as keys or values."""
    return pa.types.is_string(kind) or any(has_text(kind.field(n).type) for n in range(kind.num_fields))


PATH_REPLACEMENTS = {
    str(Path(sys.prefix).parent): "/opt/telescope", str(ROOT): "/opt/telescope", str(Path.home()): "/home/user",
}  # fmt: skip
HOST_PATTERN = re.compile(rf"\b{re.escape(socket.gethostname())}\b")
PATH_PATTERN = re.compile(
    "|".join(rf"{re.escape(name)}\b" for name in sorted(PATH_REPLACEMENTS, key=len, reverse=True))
)


def scrub(value: Any) -> Any:
    """Replaces the names of this machine in a text, or in all texts of a list, a tuple or a dictionary."""
    if isinstance(value, str):
        text = re.sub(
            r"/tmp/[^\s'\",:)]+", "/tmp/telescope", PATH_PATTERN.sub(lambda match: PATH_REPLACEMENTS[match[0]], value)
        )
        text = re.sub(r"(\d\.\d{4})\d+", r"\1", text)  # more digits compress badly
        return HOST_PATTERN.sub("node-1", text.replace(f"{getpass.getuser()}@", "user@"))
    if isinstance(value, list | tuple):
        return type(value)(scrub(one) for one in value)
    return {key: scrub(one) for key, one in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    sys.exit(main())
