"""The verdict of a run in the dashboard."""

import json
import math

import pyarrow as pa

from telescope.dashboard.registry import Registry
from telescope.dashboard.runs import health_of
from telescope.dashboard.steps import metric_columns
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run


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
