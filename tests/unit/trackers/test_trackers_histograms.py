"""A step's histograms are sent once, when all of them are there."""

from typing import Any

from telescope.trackers.charts import StepHistograms

BINS = ([1, 3], [0.0, 0.5, 1.0])


def row(step: int, metric: str = "reward", environment: str = "", bins: Any = BINS) -> dict[str, Any]:
    return {"step": step, "metric": metric, "environment": environment, "histogram": bins[0], "bin_edges": bins[1]}


def test_the_newest_step_waits_for_the_rest_of_its_rows() -> None:
    histograms = StepHistograms()
    assert list(histograms.take([row(0), row(0, "age"), row(1)])) == [
        (0, {"distribution/reward": BINS, "distribution/age": BINS})
    ]
    assert list(histograms.take([row(1, "age")])) == []
    assert [(step, len(values)) for step, values in histograms.take([], last=True)] == [(1, 2)]


def test_environments_have_histograms_when_there_are_several() -> None:
    one = [row(0), row(0, environment="a")]
    ((_, values),) = StepHistograms().take(one, last=True)
    assert list(values) == ["distribution/reward"]
    ((_, values),) = StepHistograms().take([*one, row(0, "sample_metrics/x", "b")], last=True)
    assert list(values) == ["distribution/reward", "distribution/a/reward", "distribution/b/sample_metrics/x"]


def test_a_step_that_is_trained_again_is_not_sent_again() -> None:
    histograms = StepHistograms()
    assert [step for step, _ in histograms.take([row(0), row(1), row(2)])] == [0, 1]
    assert [step for step, _ in histograms.take([row(1), row(2), row(3)])] == [2]


def test_a_row_without_a_histogram_is_left_out() -> None:
    assert list(StepHistograms().take([row(0, bins=(None, None))], last=True)) == []
