"""What a live run does, its verdict, its model and its checkpoints."""

import json
import math
import time

import pyarrow as pa
import pytest
from tests.unit.dashboard.conftest import client_of, write_run

from telescope.config.model_shape import ModelShape, known_shape
from telescope.dashboard.architecture import architecture_of, parts_of
from telescope.dashboard.registry import Registry
from telescope.dashboard.runs import health_of
from telescope.dashboard.steps import metric_columns
from telescope.orchestrator.status import RunStatus
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run, end_run

CONFIG = {
    **{"model_type": "qwen2", "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 283},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


@pytest.fixture
def live(tmp_path):
    """A live run, its recorder and requests to it."""
    with Recorder(tmp_path / "run") as recorder:
        begin_run(recorder, name="run", config_hash="c", config_json=json.dumps({"values": {"model": "somewhere"}}))
        yield recorder, client_of(tmp_path)


def test_a_live_run_shows_phase_requests_queue_and_servers(live):
    recorder, client = live
    status = RunStatus("run", 60, phase="training", step=12, num_generating=5, num_slots=8)
    for part in ("trainer", "server 10", "server 2", "batches"):
        status.components[part] = f"{part} works"
    recorder.now = lambda: {**status.now(), "time": time.time() - 100}
    recorder.set_in_flight([{"sample_id": "a", "started_at": time.time() - 30}])
    for server, waiting in ((0, 9.0), (0, 2.0), (1, 1.0)):
        gauge = {"name": "vllm:num_requests_waiting", "component": "inference", "server": server}
        recorder.write("gauges", {"time": time.time(), **gauge, "value": waiting})
    assert recorder.flush()
    now = client.get("/api/runs/run/now").json()
    assert now["live"] and now["trainer"] == "trainer works"
    assert [now[name] for name in ("phase", "step", "num_generating", "num_slots")] == ["training", 12, 5, 8]
    assert [server["name"] for server in now["servers"]] == ["server 2", "server 10"]
    assert now["components"] == {"batches": "batches works"}
    assert now["num_waiting"] == 3
    assert now["oldest_seconds"] >= 30
    assert 100 <= now["age_seconds"] < 150, "whatever the clock of the browser says"


def test_an_ended_run_does_nothing_now(client):
    now = client.get("/api/runs/first/now").json()
    assert not now["live"] and now["phase"] is None and now["servers"] == []


def test_the_checkpoints_of_a_run_are_listed(tmp_path):
    write_run(tmp_path / "run", "grpo")
    for name in ("step_10", "step_2", ".partial-step_12", "step_x"):
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    client = client_of(tmp_path)
    assert client.get("/api/runs/run").json()["checkpoints"] == [2, 10]


@pytest.mark.parametrize(("attempts", "written"), [
    ([(0, [4, 8, 12]), (8, [14])], [4, 8, 14]),
    ([(0, [])], None),  # left to the metrics of its steps
])  # fmt: skip
def test_a_copy_without_checkpoints_knows_which_the_ended_run_has_written(tmp_path, attempts, written):
    for attempt, (first, steps) in enumerate(attempts, 1):
        with Recorder(tmp_path / "run", attempt=attempt) as recorder:
            info = begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=first, num_steps=14)
            for component, step in (*(("orchestrator", step) for step in steps), ("trainer", 3)):
                span = {"component": component, "name": "checkpoint", "step": step, "start": 1.0, "end": 2.0}
                recorder.write("spans", span)
            recorder.flush()
            client = client_of(tmp_path)
            assert client.get("/api/runs/run").json()["written"] is None, "a live run has the metrics of its steps"
            end_run(recorder, info, "finished", config_json="{}")
    assert client.get("/api/runs/run").json()["written"] == written


def test_the_parts_of_a_model_add_up_to_its_parameters():
    shapes = [ModelShape.from_config(CONFIG), known_shape("Qwen/Qwen3-30B-A3B"), known_shape("Qwen/Qwen2.5-7B")]
    for shape in shapes:
        assert sum(part["count"] * part["parameters"] for part in parts_of(shape)) == shape.num_parameters


def test_the_model_is_that_of_the_newest_attempt(tmp_path):
    with Recorder(tmp_path) as recorder:
        for attempt, layers in ((1, 2), (2, 4)):
            config = json.dumps({**CONFIG, "num_hidden_layers": layers})
            recorder.write("attempts", {"attempt": attempt, "model_config": config})
    found = architecture_of(Run(tmp_path))
    assert (found["layers"], found["source"], found["model_type"]) == (4, "attempt 2", "qwen2")
    assert found["active_parameters"] == found["parameters"]


def test_the_model_of_an_older_record_is_found_in_its_files(tmp_path):
    Recorder(tmp_path).close()
    (tmp_path / "checkpoints" / "step_4" / "hf_meta").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_4" / "hf_meta" / "config.json").write_text(json.dumps(CONFIG))
    assert architecture_of(Run(tmp_path))["source"] == "checkpoints/step_4/hf_meta/config.json"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    assert architecture_of(Run(tmp_path))["layers"] == 4


def test_a_well_known_model_has_its_sizes_without_a_file_and_an_unknown_one_no_parts(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    found = architecture_of(Run(tmp_path))
    assert (found["parts"], found["parameters"], found["source"]) == ([], None, None)
    (tmp_path / "config.yaml").write_text("model: Qwen/Qwen3-30B-A3B\n")
    found = architecture_of(Run(tmp_path))
    assert found["source"] == "a table of well-known models"
    assert found["active_parameters"] == pytest.approx(3.3e9, rel=0.05)


def test_waiting_requests_are_found_among_the_gauges_of_many_gpus(live):
    recorder, client = live
    recorder.now = RunStatus("run", 60, phase="training").now
    gauge = {"name": "vllm:num_requests_waiting", "component": "inference"}
    recorder.write("gauges", {**gauge, "time": time.time() - 12, "server": 0, "value": 4.0})
    recorder.write("gauges", {**gauge, "time": time.time() - 9, "server": 0, "value": 2.0})
    for number in range(9000):
        row = {"time": time.time() - 8 + number / 1200, "name": "gpu_power_watts", "component": "gpu"}
        recorder.write("gauges", {**row, "gpu": number % 64, "value": float(number)})
    assert recorder.flush()
    assert client.get("/api/runs/run/now").json()["num_waiting"] == 2


def test_the_verdict_of_a_run_and_its_recorded_alerts(client):
    body = client.get("/api/runs/first/health").json()
    assert body["verdict"][0]["text"] == "grad_norm is not a finite number after 4 steps."
    cells = {cell["name"]: (cell["words"], cell["attention"]) for cell in body["cells"]}
    assert (cells["wait"], cells["entropy"]) == (("needs more servers", True), ("falling", False))
    (alert,) = body["alerts"]
    words = ("Server 0 restarted", "Look at its log.")
    assert (alert["step"], alert["title"], alert["text"], alert["resolved"]) == (2, *words, True)
    assert body["progress"] == {"step": 12, "num_steps": 12, "seconds_left": None}


def test_a_recorded_nan_differs_from_a_metric_that_a_step_lacks():
    rows = [{"entropy": 1.0}, {"entropy": math.nan}, {"loss": math.inf}]
    metrics = pa.chunked_array([pa.array([list(row.items()) for row in rows], pa.map_(pa.string(), pa.float64()))])
    columns = {name: values.tolist() for name, values in metric_columns(metrics).items()}
    assert columns["entropy"][:2] == [1.0, math.inf] and math.isnan(columns["entropy"][2])
    assert columns["loss"][2] == math.inf and math.isnan(columns["loss"][0])


def test_a_resumed_run_does_not_stand_still_before_its_first_step(tmp_path):
    start = {"name": "run", "config_hash": "c", "config_json": json.dumps({"values": {}}), "num_steps": 20}
    texts = []
    for attempt, steps in enumerate((range(3), range(0), range(3, 4)), 1):  # all steps ended long ago
        with Recorder(tmp_path / "run", attempt=attempt) as recorder:
            begin_run(recorder, **start, first_step=3 if attempt > 1 else 0)
            for step in steps:
                times = {"started_at": 10.0 * step, "ended_at": 10.0 * step + 10.0}
                recorder.write("steps", {"step": step, **times, "metrics": {}})
            assert recorder.flush()
            texts.append(health_of(Registry([tmp_path]).store("run"))["verdict"][0]["text"])
    assert [text.startswith("No step has ended for") for text in texts] == [True, False, True]
