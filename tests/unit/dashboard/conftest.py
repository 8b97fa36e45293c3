"""A small run that is written once, and a client of the dashboard over it."""

import io
import json
import random
import tarfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from telescope.dashboard.app import create_app
from telescope.environments.types import PreparedPrompt
from telescope.orchestrator.record_rows import prompt_row
from telescope.orchestrator.step_stats import distribution
from telescope.record.files import RunFiles, replace_json
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run, end_run

T0 = 1_800_000_000.0
NUM_STEPS = 12
NUM_GROUPS = 4
SAMPLES_PER_GROUP = 4
STEP_SECONDS = 10.0


def sample_rows(step: int) -> list[dict[str, Any]]:
    """Samples of one step. The last group is discarded, because all its rewards are equal."""
    chosen = random.Random(step)
    rows: list[dict[str, Any]] = []
    for group in range(NUM_GROUPS):
        kept = group < NUM_GROUPS - 1
        for index in range(SAMPLES_PER_GROUP):
            reward = float(chosen.random() < 0.2 + 0.05 * step) if kept else 0.0
            start = T0 + STEP_SECONDS * step
            fate = {"status": "kept"} if kept else {"status": "discarded", "reason": "zero_advantage"}
            rows.append({
                "sample_id": f"{step * NUM_GROUPS + group}-{index}", "group_id": step * NUM_GROUPS + group,
                "sample_index": index, "environment": ("countdown", "wordle")[group % 2], "step": step,
                "reason": None, **fate, "reward": reward, "advantage": reward - 0.5 if kept else None,
                "prompt_text": f"<|im_start|>user\nMake {step} of 100 % of the numbers<|im_end|>\n",
                "completion_text": f"the answer_{index} of group {group} is Straße", "golden": {"target": str(step)},
                "metrics": {"correct": reward}, "tags": {"level": str(group)}, "num_turns": 1, "prompt_tokens": 10,
                "stop_reason": "length" if index == 3 else "stop", "completion_tokens": chosen.randrange(5, 50),
                "start_version": step, "end_version": step, "age": 0, "server": 0, "lane": index,
                "started_at": start, "generated_at": start + 4, "finished_at": start + 5,
            })  # fmt: skip
    return rows


def write_sample(recorder: Recorder, row: Mapping[str, Any]) -> None:
    """Writes a sample and its prompt, whose `messages` are by default one of the user."""
    if "prompt_text" in row:
        row = dict(row)
        text = row.pop("prompt_text")
        only = {"role": "user", "content": text.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n")}
        prompt = prompt_row(row["environment"], PreparedPrompt([], text, row.pop("messages", [only]), ""))
        recorder.write("prompts", prompt)
        row |= {"prompt_key": prompt["prompt_key"], "completion_text": None}
    recorder.write("samples", row)


def write_step(recorder: Recorder, step: int) -> None:
    rows = sample_rows(step)
    for row in rows:
        write_sample(recorder, row)
        turn = {"sample_id": row["sample_id"], "turn": 0, "role": "assistant", "text": row["completion_text"]}
        recorder.write("turns", {**turn, "num_tokens": 3})
        values = [0.0, -0.1, -0.2, float("nan")]
        numbers = {"engine_logprobs": values, "trainer_logprobs": values, "entropies": values}
        tokens = {"token_ids": [9, 1, 2, 3], "trained": [False] + [True] * 3, "versions": [-1] + [step] * 3, **numbers}
        recorder.write("tokens", {"sample_id": row["sample_id"], "part": 0, "step": step, **tokens})
        span = {"name": "generate", "component": "rollout", "server": 0, "step": step, "sample_id": row["sample_id"]}
        times = {"start": row["started_at"], "end": row["generated_at"]}
        attributes = {"lane": str(row["lane"]), "first_token_seconds": "0.25"}
        recorder.write("spans", {**span, **times, "attributes": attributes})
    for group in range(NUM_GROUPS):
        of_group = [row for row in rows if row["group_id"] == step * NUM_GROUPS + group]
        rewards = [row["reward"] for row in of_group]
        row = {name: of_group[0][name] for name in ("group_id", "environment", "step", "status", "reason")}
        row |= {"num_samples": len(rewards), "opened_at": of_group[0]["started_at"]}
        recorder.write("groups", {**row, "reward_mean": sum(rewards) / len(rewards), "reward_std": 0.5})
    trained = [row["reward"] for row in rows if row["status"] == "kept"]
    mean = sum(trained) / len(trained)
    metrics: dict[str, float] = {}
    for environment in ("", "countdown", "wordle"):
        chosen = [row for row in rows if row["status"] == "kept" and environment in ("", row["environment"])]
        rewards = np.array([row["reward"] for row in chosen])
        of_group = np.array([row["group_id"] for row in chosen])
        for metric in ("reward", "sample_metrics/correct"):
            names = {"step": step, "environment": environment, "metric": metric}
            recorder.write("step_stats", {**names, **distribution(rewards, of_group)})
        if environment:
            metrics |= {f"reward/{environment}/mean": rewards.mean()}
            metrics |= {f"sample_metrics/{environment}/correct": rewards.mean()}
    metrics |= {
        "reward/all_groups/mean": sum(row["reward"] for row in rows) / len(rows), "reward/total/mean": mean,
        "entropy": 1.0 - 0.01 * step, "timing_waiting_for_data": 6.2, "timing_step_total": STEP_SECONDS,
        "grad_norm": float("nan") if step == 3 else 1.0,
    }  # fmt: skip
    start = T0 + STEP_SECONDS * step
    columns = {"version": step + 1, "started_at": start, "ended_at": start + STEP_SECONDS, "num_tokens_trained": 100}
    columns["reward_mean"] = metrics["reward/all_groups/mean"]
    recorder.write("steps", {"step": step, **columns, "metrics": metrics})
    gauge = {"time": start, "name": "queue_depth", "component": "orchestrator"}
    recorder.write("gauges", {**gauge, "value": step})
    line = {"time": T0 + step, "level": "INFO", "component": "driver", "source": f"driver-{step % 2}.log"}
    recorder.write("logs", {**line, "message": f"step {step} of it"})


def write_sandboxes(recorder: Recorder, step: int) -> None:
    """Writes what the first sample of a step did in a sandbox of a pool, and gauges of sandboxes."""
    sample, start = sample_rows(step)[0]["sample_id"], T0 + STEP_SECONDS * step
    calls = [("create", 0.0, 0.5), ("queue", 4.1, 4.3), ("exec", 4.3, 4.5), ("exec", 4.5, 4.9), ("destroy", 9.0, 9.25)]
    for name, begin, end in calls:
        used = {"sample_id": sample if name in ("queue", "exec") else None, "start": start + begin, "end": start + end}
        attributes = {"provider": "local", "sandbox": "local-7f", "worker": "0"}
        attributes |= {"error": "SandboxCommandTimeoutError"} if begin == 4.5 else {}
        recorder.write("spans", {"name": name, "component": "sandbox", **used, "attributes": attributes})
    call = {"sample_id": sample, "turn": 0, "call": 0, "name": "shell", "arguments": '{"command": "ls"}', "result": "a"}
    recorder.write("tool_calls", {**call, "sandbox": "local-7f"})
    failures = {"operation": "exec", "error": "SandboxCommandTimeoutError"}
    for time in range(3):
        for name, value, labels in (
            ("sandboxes_alive", 4.0, {}), ("sandbox_creates_total", 2.0 * time, {}),
            ("sandbox_execs_total", 20.0 * time, {}), ("sandbox_failures_total", float(time), failures),
        ):  # fmt: skip
            row = {"time": start + 4 * time, "name": name, "component": "sandbox", "value": value}
            recorder.write("gauges", {**row, "labels": {"provider": "local", **labels}})


def write_code(path: Path, files: Mapping[str, str | bytes], git: Mapping[str, Any] | None = None) -> None:
    """Writes an archive of code with these files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {"git.json": json.dumps({"commit": "c0ffee", "left_out": ["data.bin (9 bytes)"], **(git or {})})}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**files, **described}.items():
            content = text if isinstance(text, bytes) else text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_run(run_dir: Path, algorithm: str, *, resumed: bool = False) -> None:
    """Writes a finished run. A resumed one has a second attempt from step 10 on, which uses sandboxes."""
    config = {"model": "tiny", "algorithm": algorithm, "environments": [{"name": "countdown"}, {"name": "wordle"}]}
    text = json.dumps({"values": config, "user_set": ["algorithm"]})
    parts = [range(NUM_STEPS), range(10, NUM_STEPS)] if resumed else [range(NUM_STEPS)]
    for attempt, part in enumerate(parts, 1):
        with Recorder(run_dir, attempt=attempt) as recorder:
            start = {"config_hash": "c", "config_json": text, "first_step": part[0], "num_steps": NUM_STEPS}
            info = begin_run(recorder, name=run_dir.name, **start)
            ranges = {"metrics_ranges": '{"correct": {"min": 0, "max": 1}}'}
            recorder.write("environments", {"key": "countdown", "name": "countdown", "purpose": "training", **ranges})
            for step in part:
                write_step(recorder, step)
            if attempt == 2:
                write_sandboxes(recorder, NUM_STEPS - 1)
            if attempt == 1:
                evaluation = {"eval_id": "e", "step": -1}
                recorder.write("evals", {**evaluation, "name": "math", "status": "finished", "accuracy": 0.5})
                recorder.write("eval_samples", {**evaluation, "sample_id": "0-0", "item": 3, "completion": 0})
                alert = {"time": T0, "level": "warning", "kind": "server", "step": 2}
                recorder.write("alerts", {**alert, "message": "Server 0 restarted. Look at its log."})
            end_run(recorder, info, "finished", config_json=text)
    write_code(run_dir / "code" / "attempt-1.tar.gz", {"sources/train.py": f"algorithm = {algorithm!r}\n"})
    replace_json(RunFiles(run_dir).summary, {"heldout_after": 0.5})


def hold(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *first: object
) -> tuple[threading.Event, threading.Event]:
    """Holds calls of a function (with these first arguments). Returns when one has begun, and what lets it go on."""
    begun, go_on, function = threading.Event(), threading.Event(), getattr(owner, name)

    def slow(*arguments: Any) -> Any:
        if arguments[: len(first)] == first:
            begun.set()
            assert go_on.wait(30)
        return function(*arguments)

    monkeypatch.setattr(owner, name, slow)
    return begun, go_on


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `first`, whose second attempt begins at step 10, and `below/second`."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first", "grpo", resumed=True)
    write_run(folder / "below" / "second", "rloo")
    return folder


def client_of(*roots: Path, **options: Any) -> TestClient:
    """Requests to the dashboard of the runs below some folders."""
    return TestClient(create_app(list(roots), **options), base_url="http://localhost")


@pytest.fixture(scope="session")
def client(root: Path) -> TestClient:
    return client_of(root)
