"""Benchmarks of whole runs: idle time across a restart, forced lengths, and the fate of every sample."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from telescope.inference.base import GenerateRequest
from telescope.inference.vllm.step_meter import StepReading


def series(*readings: tuple[float, float, int, int]) -> Any:
    """Of (time, busy seconds, steps, tokens)."""
    from whole_run import MeterSeries

    made = MeterSeries()
    for at, busy, steps, tokens in readings:
        made.add(at, StepReading(at, busy, steps, tokens, running=1))
    return made


def test_idle_is_what_is_not_busy() -> None:
    meter = series((0, 0.0, 0, 0), (1, 0.5, 10, 100), (2, 1.5, 20, 300), (3, 1.5, 20, 300))
    assert meter.idle_share(0, 3) == pytest.approx(0.5)
    assert meter.idle_share(1, 2) == 0.0
    assert meter.tokens_per_second(0, 2) == 150.0


def test_an_exited_engine_is_idle_and_a_restarted_one_counts_from_zero() -> None:
    meter = series((0, 9.0, 90, 900), (1, 10.0, 100, 1000), (7, 0.0, 0, 0), (8, 1.0, 10, 100))
    assert meter.idle_share(0, 8) == pytest.approx(6 / 8)
    assert meter.between(0, 8, lambda reading: reading.tokens) == 200


def test_idle_in_pauses_excludes_the_transfer_outside_them() -> None:
    from end_to_end import paused_share

    def step(*pauses: float) -> dict[str, Any]:
        metrics = {f"weight_sync/pause_seconds/server_{n}": pause for n, pause in enumerate(pauses)}
        slowest = {f"weight_sync/transfer_seconds/server_{n}": 5.0 for n in range(len(pauses))}
        return {"metrics": {**metrics, **slowest, "timing_weight_sync_trainer_total": 6.0}}

    assert paused_share([step(0.1, 0.3), step(0.2, 0.2)], 2, 10.0) == pytest.approx(0.8 / 2 / 10)
    assert paused_share([step(0.1)], 2, 10.0) == pytest.approx(0.005)  # the other one failed its sync
    assert paused_share([], 2, 10.0) == 0.0


def test_forced_lengths_have_the_stated_mean_and_percentile() -> None:
    from forced_lengths import Lengths

    lengths = Lengths(1000, 3500)
    drawn = np.array([lengths.of(seed) for seed in range(40_000)])
    assert drawn.mean() == pytest.approx(1000, rel=0.02)
    assert np.percentile(drawn, 99) == pytest.approx(3500, rel=0.04)
    assert lengths.of(7) == lengths.of(7)
    with pytest.raises(ValueError, match="no log-normal"):
        Lengths(1000, 100_000)


def test_a_forced_request_differs_only_in_its_length() -> None:
    from forced_lengths import Lengths

    request = GenerateRequest("r", [1, 2], 4096, 0.7, seed=11)
    forced = Lengths(100, 200).force(request)
    assert (forced.max_tokens, forced.ignore_eos) == (Lengths(100, 200).of(11), True)
    assert (forced.request_id, forced.prompt_token_ids, forced.temperature, forced.seed) == ("r", [1, 2], 0.7, 11)
    assert Lengths(100, 200).force(GenerateRequest("r", [1], 5, 1.0, seed=11)).max_tokens == 5


class Record:
    """A run of two groups of two, of which a step trained one, and whatever a test changes about it."""

    def __init__(self, **changes: list[dict[str, Any]]) -> None:
        groups = [{"group_id": n, "status": "kept", "reason": None, "step": 0} for n in range(1)]
        groups.append({"group_id": 1, "status": "cancelled", "reason": "run_ended", "step": 1})
        fates = [("kept", None)] * 2 + [("cancelled", "run_ended")] * 2
        samples = [
            {
                "sample_id": f"{n}",
                "group_id": n // 2,
                "status": status,
                "reason": reason,
                "failure_kind": None,
                "step": 0,
            }
            for n, (status, reason) in enumerate(fates)
        ]
        self.tables = {"groups": groups, "samples": samples} | changes
        self.record = self

    def table(self, name: str, columns: list[str]) -> Any:
        return SimpleNamespace(to_pylist=lambda: self.tables[name])

    def steps(self) -> list[dict[str, Any]]:
        return [{"step": 0, "num_groups": 1, "metrics": {"retried/unseen": 3.0}}]


def test_a_complete_record_passes() -> None:
    from engine_loss import account

    answer = account(Record(), 2)  # type: ignore[arg-type]
    assert answer["by_fate"] == {"kept": 2, "cancelled/run_ended": 2}
    assert (answer["masked_by_infrastructure"], answer["requests_asked_again"]) == (0, 3)


@pytest.mark.parametrize(
    ("table", "change", "words"),
    [
        ("samples", lambda rows: rows[:-1], "groups do not have 2 samples"),
        ("samples", lambda rows: [*rows, rows[0]], "a sample has two rows"),
        ("groups", lambda rows: [*rows, rows[1]], "a group has two rows"),
        ("groups", lambda rows: rows[1:], "an opened prompt has no row"),
        ("groups", lambda rows: [{**rows[0], "status": "discarded"}, rows[1]], "trained other groups"),
    ],
)
def test_an_incomplete_record_fails(table: str, change: Any, words: str) -> None:
    from engine_loss import account

    with pytest.raises(RuntimeError, match=words):
        account(Record(**{table: change(Record().tables[table])}), 2)  # type: ignore[arg-type]


def test_a_report_does_not_contain_the_path_of_the_sources(tmp_path: Path) -> None:
    from whole_run import FIELDS, REPOSITORY, write_report

    write_report(tmp_path / "report.json", "any", {}, "tiny", None, FIELDS, {})
    report = (tmp_path / "report.json").read_text()
    assert '"benchmarks/environments"' in report
    assert str(REPOSITORY) not in report


def test_set_overrides_the_benchmark_which_overrides_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from whole_run import FIELDS, QUICK_FIELDS, Case, add_case_arguments

    monkeypatch.setattr("whole_run.gpu_names", list)
    parser = ArgumentParser()
    add_case_arguments(parser, port=1)
    case = Case.of(parser.parse_args(["--quick", "--set", "group_size=3", "device=cuda"]), inference_num_workers=2)
    assert case.fields == FIELDS | QUICK_FIELDS | {"inference_num_workers": 2, "group_size": 3, "device": "cuda"}
    assert case.shape == "tiny"
    case = Case.of(parser.parse_args(["--shape", "qwen2.5-0.5b"]), inference_num_workers=2)
    assert (case.fields, case.shape) == (FIELDS, "qwen2.5-0.5b")


def test_the_output_of_a_failed_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from whole_run import Case, add_case_arguments

    monkeypatch.setattr("whole_run.gpu_names", list)
    monkeypatch.setattr("whole_run.prepare_model", lambda folder, shape, on_gpu: folder / "model")
    parser = ArgumentParser()
    add_case_arguments(parser, port=1)
    case = Case.of(parser.parse_args(["--quick", "--keep-log", str(tmp_path / "kept.log")]))

    def fail(run: Any) -> None:
        run.log.write_text("its last words")
        raise RuntimeError("it failed")

    with pytest.raises(RuntimeError, match="it failed"), case.prepared("any") as run:
        fail(run)
    assert (tmp_path / "kept.log").read_text() == "its last words"


def test_a_run_that_only_warmed_up_has_no_results() -> None:
    from end_to_end import results_of

    with pytest.raises(RuntimeError, match="only 1 step ended, of which 3 do not count"):
        results_of(Record(), 3, -2)  # type: ignore[arg-type]


def test_the_number_of_steps_cannot_be_set(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import end_to_end

    monkeypatch.setattr(sys, "argv", ["end_to_end.py", "--quick", "--set", "number_of_steps=5"])
    with pytest.raises(SystemExit):
        end_to_end.parse()
    assert "it follows from --steps and --warm-up" in capsys.readouterr().err
