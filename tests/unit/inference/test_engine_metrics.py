"""vLLM's Prometheus metrics as gauges, from what vLLM 0.32 really answered."""

from pathlib import Path

import pytest

from telescope.inference import engine_metrics
from telescope.inference.engine_metrics import metrics_reader, parse
from telescope.inference.vllm.step_meter import StepReading, metrics_text

ANSWER = (Path(__file__).parent / "metrics" / "0.32.txt").read_text()


def test_gauges_and_counters_keep_names_and_distinguishing_labels():
    found = {(reading.name, reading.labels): reading.value for reading in parse(ANSWER, 5.0)}
    assert found["vllm:num_requests_running", ()] == 0.0
    assert found["vllm:kv_cache_usage_perc", ()] == 0.0
    assert found["vllm:prefix_cache_queries_total", ()] == 65.0
    reasons = {labels[0][1]: value for (name, labels), value in found.items() if name == "vllm:request_success_total"}
    assert reasons["length"] + reasons["stop"] == 12
    assert {reading.time for reading in parse(ANSWER, 5.0)} == {5.0}


def test_a_histogram_is_its_sum_its_count_and_its_cumulative_buckets():
    readings = [r for r in parse(ANSWER, 0.0) if r.name.startswith("vllm:time_to_first_token_seconds")]
    found = {reading.name: reading.value for reading in readings if not reading.labels}
    assert found.keys() == {"vllm:time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_count"}
    assert found["vllm:time_to_first_token_seconds_sum"] == pytest.approx(202.0476)
    buckets = [(r.labels[0], r.value) for r in readings if r.labels]
    assert all(name == "le" for (name, _), _ in buckets)
    assert buckets[-1] == (("le", "+Inf"), found["vllm:time_to_first_token_seconds_count"])
    assert sorted(value for _, value in buckets) == [value for _, value in buckets]


def test_other_metrics_and_non_measurements_are_left_out():
    names = {reading.name for reading in parse(ANSWER, 0.0)}
    assert all(name.startswith("vllm:") for name in names)
    assert not any(name.endswith(("_created", "_info")) for name in names)


def test_the_steps_that_the_meter_counts_are_read_too():
    counted = metrics_text(StepReading(clock=9.0, busy_seconds=4.5, steps=3, tokens=70, running=2)).decode()
    found = {reading.name: reading.value for reading in parse(ANSWER + counted, 0.0)}
    assert found["telescope:engine_busy_seconds_total"] == 4.5
    assert found["telescope:engine_steps_total"] == 3


def test_buckets_are_read_at_intervals(monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(engine_metrics.time, "monotonic", lambda: clock[0])
    read = metrics_reader(lambda: ANSWER)

    def has_buckets() -> bool:
        names = {reading.name for reading in read()}
        assert "vllm:time_to_first_token_seconds_count" in names
        return "vllm:time_to_first_token_seconds_bucket" in names

    found = []
    for _ in range(12):
        found.append(has_buckets())
        clock[0] += 1.0
    assert found == [True, *[False] * 9, True, False]


def test_an_absent_server_gives_no_reading_and_no_failure():
    assert metrics_reader(lambda: None)() == []
