"""What changed at a step, and where the time went: checked against the rows of the record."""

from pathlib import Path
from typing import Any

import pytest

from telescope.dashboard.changes import changes
from telescope.dashboard.costs import costs
from telescope.dashboard.store import RunStore
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run

REWARD = "reward/all_groups/mean"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """Six steps: from step 3 on more `hard` samples, better `easy` ones, slower weight syncs, and a killed server."""
    folder = tmp_path_factory.mktemp("changes") / "run"
    with Recorder(folder) as recorder:
        topology = {"trainer rank 0": "a, cuda:0", "inference server 0": "a, 2 GPUs", "inference server 1": "b, 1 GPUs"}
        started = {"attempt": 1, "started_at": 100.0, "topology": topology}
        begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=0, attempt=started)
        for step in range(6):
            late = step >= 3
            rewards = {"easy": [1.0, 0.0] * 3 if not late else [1.0, 1.0], "hard": [0.0] * (2 if not late else 6)}
            for environment, values in rewards.items():
                for index, reward in enumerate(values):
                    row = sample(step, environment, index, reward)
                    recorder.write("samples", row)
                    turn = {"sample_id": row["sample_id"], "turn": 0, "role": "assistant"}
                    recorder.write("turns", {**turn, "text": f"answer {row['sample_id']}"})
            recorder.write("spans", span("weight_sync", 110.0 + 10 * step, 2.0 if late else 1.0))
            metrics = {"entropy": 1.0 + late + 0.01 * (step % 2), "timing_engines_idle": 2.0, "timing_step_total": 10.0}
            times = {"started_at": 110.0 + 10 * step, "ended_at": 120.0 + 10 * step}
            recorder.write("steps", {"step": step, "metrics": {**metrics, "timing_forward_rank_mean": 4.0}, **times})
        down = {"time": 141.0, "level": "warning", "kind": "server", "message": "server 1 is down", "step": 3}
        recorder.write("alerts", down)
    return RunStore(Run(folder))


def sample(step: int, environment: str, index: int, reward: float) -> dict[str, Any]:
    times = {"started_at": 110.0 + 10 * step, "generated_at": 115.0 + 10 * step, "finished_at": 116.0 + 10 * step}
    name = f"{step}-{environment}-{index}"
    return {
        "sample_id": name, "group_id": step * 100 + index, "environment": environment, "step": step, "reward": reward,
        "status": "kept" if index % 2 else "discarded", "tags": {"level": environment}, "completion_tokens": 10,
        "wasted_tokens": 5, **times,
    }  # fmt: skip


def span(name: str, start: float, seconds: float) -> dict[str, Any]:
    return {"name": name, "component": "weights", "server": 0, "start": start, "end": start + seconds}


def test_mix_and_within_add_up_to_the_change(store: RunStore) -> None:
    cells = {cell["environment"]: cell for cell in changes(store, 3, 3, REWARD)["cells"]}
    (before,), (after,) = store.fetch("SELECT avg(reward) FROM samples GROUP BY step >= 3 ORDER BY step >= 3")
    assert sum(cell["mix"] + cell["within"] for cell in cells.values()) == pytest.approx(after - before)
    assert cells["easy"]["within"] == pytest.approx((6 / 8 + 2 / 8) / 2 * 0.5)
    assert cells["hard"]["within"] == 0
    assert cells["hard"]["mix"] < 0, "its share grew, and its reward is below the mean"
    assert [cells["hard"][name] for name in ("cell", "n_before", "n_after")] == ["level=hard", 6, 18]


def test_answers_without_context_count_as_truncated_as_in_the_metric(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        for step, reasons in enumerate((["stop", "stop"], ["length", "context_exhausted"])):
            for index, reason in enumerate(reasons):
                row = sample(step, "wordle", index, 0.0) | {"status": "kept", "stop_reason": reason}
                recorder.write("samples", row)
            recorder.write("steps", {"step": step, "metrics": {"stop_reason_length_pct": 100.0 * step}})
    found = changes(RunStore(Run(tmp_path / "run")), 1, 1, "stop_reason_length_pct")
    assert [(cell["mean_before"], cell["mean_after"]) for cell in found["cells"]] == [(0, 100)]


def test_what_else_differs_is_ordered_by_its_effect(store: RunStore) -> None:
    found = changes(store, 3, 3, "entropy")
    assert found["decomposed"] == REWARD
    effects = {effect["name"]: effect for effect in found["effects"]}
    assert effects["entropy"]["after"] - effects["entropy"]["before"] == pytest.approx(1, abs=0.01)
    assert effects["entropy"]["effect"] > 50
    assert (effects["weight_sync server 0"]["before"], effects["weight_sync server 0"]["after"]) == (1, 2)
    sizes = [abs(effect["effect"]) for effect in found["effects"]]
    assert sizes == sorted(sizes, reverse=True)
    assert [event["message"] for event in found["events"]] == ["server 1 is down"]


def test_the_answers_that_differ_most_lie_after_the_step_and_on_the_side_of_the_change(store: RunStore) -> None:
    risen = changes(store, 3, 3, "reward/easy/mean")
    assert {(answer["environment"], answer["value"]) for answer in risen["answers"]} == {("easy", 1.0)}
    fallen = changes(store, 3, 3, REWARD)["answers"]
    assert all(answer["step"] >= 3 and answer["value"] <= answer["mean_before"] for answer in fallen)
    assert fallen[0]["answer"] == f"answer {fallen[0]['sample_id']}"
    assert len({(answer["attempt"], answer["group_id"]) for answer in fallen}) == len(fallen)


@pytest.mark.parametrize("step", [0, 6, 10**18])
def test_a_step_without_steps_on_both_sides_has_no_change(store: RunStore, step: int) -> None:
    found = changes(store, step, 3, REWARD)
    assert not any(effect["effect"] for effect in found["effects"])
    assert all(cell["n_before"] == 0 or cell["n_after"] == 0 for cell in found["cells"])


def test_the_hours_of_engines_and_ranks_are_divided_completely(store: RunStore) -> None:
    found = costs(store)
    assert found["unit"] == "GPU"
    assert found["tokens"] == {"kept": 240, "discarded": 240, "lost": 240}
    # From 100 to 170 s, with three GPUs of engines: 2 s idle in each step, 10 s before the first request.
    assert sum(found["engines"].values()) == pytest.approx(70 * 3)
    assert (found["engines"]["idle"], found["engines"]["start"]) == (6 * 2 * 3, 10 * 3)
    assert found["engines"]["kept"] == pytest.approx(found["engines"]["lost"])
    assert sum(found["trainer"].values()) == pytest.approx(70)
    assert (found["trainer"]["forward"], found["trainer"]["other"], found["trainer"]["outside steps"]) == (24, 36, 10)


def test_the_hours_of_several_attempts_leave_out_the_time_between_them_and_later_evals(tmp_path: Path) -> None:
    topology = {"trainer rank 0": "a, cuda:0", "inference server 0": "a, 1 GPUs"}
    for attempt, began, first_step in ((1, 100.0, 0), (2, 500.0, 2)):
        with Recorder(tmp_path / "run", attempt=attempt) as recorder:
            started = {"attempt": attempt, "started_at": began, "topology": topology}
            begin_run(recorder, name="r", config_hash="c", config_json="{}", first_step=first_step, attempt=started)
            times = {"started_at": began + 10, "ended_at": began + 20 * attempt}
            metrics = {"timing_engines_idle": 3.0, "timing_step_total": 8.0, "timing_forward_rank_mean": 5.0}
            recorder.write("steps", {"step": first_step, "metrics": metrics, **times})
            row = sample(first_step, "easy", 1, 1.0)
            recorder.write("samples", {**row, "started_at": began + 4, "finished_at": began + 15})
            begun_before = {"sample_id": f"{first_step}-carried", "completion_tokens": 0, "wasted_tokens": 0}
            recorder.write("samples", {**row, **begun_before, "started_at": began - 30, "finished_at": began + 15})
            # An eval of a checkpoint, hours later.
            later = {"sample_id": "standalone-1f-eval0-a-v3-0", "status": "eval", "completion_tokens": 50}
            recorder.write("samples", {**row, **later, "started_at": began + 9000, "finished_at": began + 9001})
    found = costs(RunStore(Run(tmp_path / "run")))
    # 20 and 40 s: the engine waits 4 s of each for its first request, and then 3 s for the trainer.
    assert found["engines"] == {"kept": pytest.approx(46 * 2 / 3), "lost": pytest.approx(46 / 3), "idle": 6, "start": 8}
    trainer = {name: seconds for name, seconds in found["trainer"].items() if seconds}
    assert trainer == {"forward": 10, "other": 6, "outside steps": 44}


def test_a_run_without_any_row_has_neither(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        begin_run(recorder, name="run", config_hash="c", config_json="{}")
    empty = RunStore(Run(tmp_path / "run"))
    assert changes(empty, 3, 5, REWARD)["cells"] == []
    assert not any(costs(empty)["engines"].values())
