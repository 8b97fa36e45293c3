"""Series become a few numbers of a chart, and the histograms of a step are sent once, when all of them are there."""

from typing import Any

import pytest

from telescope.trackers.charts import GaugeCharts, StepHistograms

BINS = ([1, 3], [0.0, 0.5, 1.0])


def row(name: str, value: float | None, time: float = 0.0, **columns: object) -> dict[str, object]:
    none = dict.fromkeys(("node", "gpu", "rank", "server", "labels"))
    return {**none, "component": "inference", "time": time, "name": name, "value": value, **columns}


def test_a_gauge_is_its_mean_over_time_and_its_spread_over_series():
    rows = [row("gpu_power_watts", value, gpu=gpu, component="gpu") for gpu, value in ((0, 100), (0, 300), (1, 400))]
    name = "system/gpu_power_watts"
    assert GaugeCharts().values(rows) == {name: 300, f"{name}/min": 200, f"{name}/max": 400}
    assert GaugeCharts().values(rows[:2]) == {name: 200}


def test_a_counter_is_its_growth_per_second_over_all_servers():
    charts = GaugeCharts()
    charts.values([row("vllm:generation_tokens_total", 1000, 0.0, server=server) for server in (0, 1)])
    grown = charts.values([row("vllm:generation_tokens_total", 1000 + 500 * n, 10.0, server=n) for n in (0, 1)])
    assert grown == {"vllm/generation_tokens_per_second": 50}


def test_a_counter_of_a_new_process_starts_from_0():
    charts = GaugeCharts()
    charts.values([row("vllm:prompt_tokens_total", 1000, 0.0)])
    assert charts.values([row("vllm:prompt_tokens_total", 40, 10.0)]) == {"vllm/prompt_tokens_per_second": 4}
    network = [row("network_sent_bytes", value, value, component="host") for value in (0.0, 2.0)]
    assert charts.values(network) == {"system/network_sent_bytes_per_second": 1}


def test_a_histogram_is_the_mean_of_its_new_values():
    charts = GaugeCharts()
    name = "vllm:time_to_first_token_seconds"
    charts.values(
        [row(f"{name}_sum", 5.0), row(f"{name}_count", 10.0), row(f"{name}_bucket", 3.0, labels=[("le", "1")])]
    )
    rows = [row(f"{name}_sum", 8.0, 1.0), row(f"{name}_count", 12.0, 1.0)]
    assert charts.values(rows) == {"vllm/time_to_first_token_seconds_mean": pytest.approx(1.5)}
    assert charts.values([row(f"{name}_count", 12.0, 2.0)]) == {}


def test_labels_are_part_of_the_name():
    rows = [row("vllm:num_requests_waiting_by_reason", 3.0, labels=[("reason", "capacity")])]
    assert GaugeCharts().values(rows) == {"vllm/num_requests_waiting_by_reason/capacity": 3}


def test_what_is_no_number_to_look_at_is_left_out():
    rows = [row("gpu_given", 1.0), row("telescope:engine_clock_seconds", 9.0), row("vllm:kv_cache_usage_perc", None)]
    assert GaugeCharts().values(rows) == {}


def histogram_row(step: int, metric: str = "reward", environment: str = "", bins: Any = BINS) -> dict[str, Any]:
    return {"step": step, "metric": metric, "environment": environment, "histogram": bins[0], "bin_edges": bins[1]}


def test_the_newest_step_waits_for_the_rest_of_its_rows():
    histograms = StepHistograms()
    assert list(histograms.take([histogram_row(0), histogram_row(0, "age"), histogram_row(1)])) == [
        (0, {"distribution/reward": BINS, "distribution/age": BINS})
    ]
    assert list(histograms.take([histogram_row(1, "age")])) == []
    assert [(step, len(values)) for step, values in histograms.take([], last=True)] == [(1, 2)]


def test_environments_have_histograms_when_there_are_several():
    one = [histogram_row(0), histogram_row(0, environment="a")]
    ((_, values),) = StepHistograms().take(one, last=True)
    assert list(values) == ["distribution/reward"]
    ((_, values),) = StepHistograms().take([*one, histogram_row(0, "sample_metrics/x", "b")], last=True)
    assert list(values) == ["distribution/reward", "distribution/a/reward", "distribution/b/sample_metrics/x"]


def test_a_step_that_is_trained_again_is_not_sent_again():
    histograms = StepHistograms()
    assert [step for step, _ in histograms.take([histogram_row(0), histogram_row(1), histogram_row(2)])] == [0, 1]
    assert [step for step, _ in histograms.take([histogram_row(1), histogram_row(2), histogram_row(3)])] == [2]


def test_a_row_without_a_histogram_is_left_out():
    assert list(StepHistograms().take([histogram_row(0, bins=(None, None))], last=True)) == []
