"""Kills processes of a run and compares it with an undisturbed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil

from telescope.orchestrator.checkpoints import CheckpointFolder
from telescope.record.reader import Run

NUM_PROMPTS = 6
FLAGS: dict[str, Any] = {
    "max_async_rollout": 0, "checkpoint_every": 1, "seed": 11, "lr_scheduler": "linear", "warmup_steps": 2,
    "group_size": 4, "prompts_batch_size_for_trainer": NUM_PROMPTS,
}  # fmt: skip
"""A synchronous run of small steps, each with another learning rate, that saves after each."""

DEPENDS_ON_TIMING = (
    "timing", "weight_sync/", "discarded/", "retried/", "lost/", "masked/", "cancelled/", "returned/",
    "reward/all_groups/", "memory/", "performance/",
)  # fmt: skip
"""Metrics of time, and of samples that are counted when they end. All others are compared bit for bit."""


def _has(word: str) -> Callable[[psutil.Process], bool]:
    return lambda process: word in " ".join(process.cmdline())


TARGETS: dict[str, Callable[[psutil.Process], bool]] = {
    "rank": _has("TrainerActor"),
    "server": _has("vllm.entrypoints"),
    "engine": _has("VLLM::EngineCore"),
    "worker": _has("RolloutActor"),
}


def kill(driver: int, target: str, choice: int = 0) -> bool:
    """Kills one of the driver's processes. Returns whether there was one."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if TARGETS[target](process):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    if found:
        found[choice % len(found)].kill()
    return bool(found)


def assert_trains_the_same(killed: Run, straight: Run) -> None:
    """Compares steps, metrics and samples of both, and the ledger with the record."""
    steps = [{row["step"]: row["metrics"] for row in rows(run, "steps")} for run in (killed, straight)]
    assert len(rows(killed, "steps")) == len(steps[0])
    assert steps[0].keys() == steps[1].keys() == set(range(len(steps[1])))
    for step, metrics in steps[1].items():
        compared = {name: value for name, value in metrics.items() if not name.startswith(DEPENDS_ON_TIMING)}
        assert {"loss/policy", "grad_norm", "learning_rate", "reward/total/mean"} <= compared.keys()
        assert {name: steps[0][step].get(name) for name in compared} == compared, f"step {step}"
    query = "select sample_id, step, completion_text, advantage from samples where status = 'kept' order by sample_id"
    assert killed.sql(query).rows == straight.sql(query).rows
    check_ledger(killed)


def check_ledger(run: Run) -> None:
    """Every prompt before the sampler's position was trained once, dropped once, or is in the last state."""
    checkpoint = CheckpointFolder(run.files.checkpoints).load(True)
    state, step = checkpoint.state, checkpoint.step
    trained = [row["group_id"] for row in rows(run, "groups", "kept")]
    dropped = [row["group_id"] for row in rows(run, "groups", "discarded") if row["step"] < step]
    left = [*state.sampler.unfinished, *(group.group_id for group in state.groups)]
    assert sorted([*trained, *dropped, *left]) == list(range(state.sampler.next_draw))
    assert len(trained) == state.ledger.num_trained == step * NUM_PROMPTS
    assert len(dropped) == sum(state.ledger.dropped.values())


def rows(run: Run, table: str, status: str | None = None) -> list[dict[str, Any]]:
    found = run.table(table).to_pylist(maps_as_pydicts="strict")
    return [row for row in found if status is None or row["status"] == status]
