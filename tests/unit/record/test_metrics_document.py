"""Every metric that a run records is in docs/metrics.md."""

import re
from pathlib import Path

import torch
from tests.documented_metrics import DOCUMENT, undocumented
from tests.unit.orchestrator.fakes import config_of, sample
from tests.unit.orchestrator.simulation import InMemoryRun

from telescope.inference.vllm.step_meter import StepReading, metrics_text
from telescope.orchestrator.step_metrics import DiscardCounts
from telescope.orchestrator.weight_sync import ServerSync, SyncReport
from telescope.record.system_metrics import memory_reader, read_host
from telescope.trainer.metrics import timing_metrics


def test_an_unknown_metric_is_undocumented() -> None:
    names = ["entropy", "reward/total/mean", "reward/total/median", "gauges", "a", "b"]
    assert undocumented(names) == ["a", "b", "gauges", "reward/total/median"]


async def test_every_metric_of_a_fake_run_is_documented() -> None:
    overlong = {"overlong_samples": "truncate", "overlong_penalty_factor": 0.5, "overlong_buffer_tokens": 15}
    options = {"prompts_batch_size_for_trainer": 4, "discard_group_zero_advantage": True, **overlong}
    run = InMemoryRun(config_of(environments=[{"name": "arithmetic"}, {"name": "logic"}], **options))
    await run.run()
    names = {name for metrics in run.recorder.step_metrics for name in metrics}
    assert {"reward/total/mean", "reward/logic/mean", "discarded/zero_advantage/pct", "kept/tokens"} <= names
    assert undocumented(names) == []
    assert undocumented(name for row in run.recorder.of("steps") for name in row["metrics"]) == []


def test_every_metric_of_untrained_samples_is_documented() -> None:
    counts = DiscardCounts()
    for reason, kind in (("zero_advantage", "all_negative"), ("too_slow", None), ("all_masked", None)):
        counts.discarded(reason, kind, [sample()])
    counts.masked(sample(reward=None))
    counts.cancelled(sample(), requeued=True)
    counts.requeued([sample()])
    assert undocumented(counts.take(1)) == []


def test_every_metric_of_a_weight_sync_and_of_times_is_documented() -> None:
    report = SyncReport(1, 0.0, servers=[ServerSync(0, 0.0), ServerSync(1, 0.0)])
    assert undocumented([*report.metrics(), *timing_metrics([], 1)]) == []


def test_every_gauge_of_this_machine_is_documented() -> None:
    readings = [*read_host(), *memory_reader(torch.device("cpu"))()]
    assert undocumented(reading.name for reading in readings) == []
    lines = metrics_text(StepReading(1.0, 1.0, 1, 1, 1)).decode().splitlines()
    assert undocumented(line.split()[0] for line in lines if not line.startswith("#")) == []


def test_the_pages_know_every_section_of_step_metrics() -> None:
    """Sections that the pages do not know are those of a user's backend, and have charts in the first layout."""
    page = (Path(__file__).parents[3] / "dashboard/src/pages/metrics/tree.ts").read_text()
    known = re.findall(r'"(\w+)"', "".join(re.findall(r"^(?:const FIRST|  \.\.\.\[).*$", page, re.MULTILINE)))
    sections = set(re.findall(r"^\| `(\w+)/", DOCUMENT.read_text(), re.MULTILINE))
    assert {"general", "timing", "evals", *sections} <= set(known)
