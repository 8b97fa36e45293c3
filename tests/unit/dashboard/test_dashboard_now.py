"""What a live run does, its model and its checkpoints."""

import json
import time

import pytest
from tests.unit.dashboard.conftest import client_of, write_run

from telescope.config.model_shape import ModelShape, known_shape
from telescope.dashboard.architecture import architecture_of, parts_of
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
    recorder.now = status.now
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


def test_the_age_of_what_a_run_does_does_not_depend_on_the_clock_of_a_browser(live):
    recorder, client = live
    status = RunStatus("run", 60, phase="training")
    recorder.now = lambda: {**status.now(), "time": time.time() - 100}
    assert recorder.flush()
    assert 100 <= client.get("/api/runs/run/now").json()["age_seconds"] < 150


def test_an_ended_run_does_nothing_now(client):
    now = client.get("/api/runs/first/now").json()
    assert not now["live"] and now["phase"] is None and now["servers"] == []


def test_the_checkpoints_of_a_run_are_listed(tmp_path):
    write_run(tmp_path / "run", "grpo")
    for name in ("step_10", "step_2", ".partial-step_12", "step_x"):
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    client = client_of(tmp_path)
    assert client.get("/api/runs/run").json()["checkpoints"] == [2, 10]


def test_a_copy_without_checkpoints_knows_which_the_ended_run_has_written(tmp_path):
    for attempt, (first, written) in enumerate(((0, [4, 8, 12]), (8, [14])), 1):
        with Recorder(tmp_path / "run", attempt=attempt) as recorder:
            info = begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=first, num_steps=14)
            for component, step in (*(("orchestrator", step) for step in written), ("trainer", 3)):
                span = {"component": component, "name": "checkpoint", "step": step, "start": 1.0, "end": 2.0}
                recorder.write("spans", span)
            recorder.flush()
            client = client_of(tmp_path)
            assert client.get("/api/runs/run").json()["written"] is None, "a live run has the metrics of its steps"
            end_run(recorder, info, "finished", config_json="{}")
    assert client.get("/api/runs/run").json()["written"] == [4, 8, 14]


def test_an_ended_run_without_spans_of_checkpoints_leaves_them_to_its_metrics(tmp_path):
    with Recorder(tmp_path / "run", attempt=1) as recorder:
        info = begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=0, num_steps=4)
        recorder.write("spans", {"component": "trainer", "name": "step", "step": 3, "start": 1.0, "end": 2.0})
        recorder.flush()
        end_run(recorder, info, "finished", config_json="{}")
    assert client_of(tmp_path).get("/api/runs/run").json()["written"] is None


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
