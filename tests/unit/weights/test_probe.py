"""Claims about the probe's verdict, with fingerprints computed from real tensors."""

from typing import Any

import pytest
import torch

from telescope.weights.fingerprint import fingerprint
from telescope.weights.plan import to_hex
from telescope.weights.probe import TOLERANCES, compare, compare_logprobs, probe_text


def share(
    tensor: torch.Tensor, rows: tuple[int, int], columns: tuple[int, int], place: str = "layer"
) -> dict[str, Any]:
    part = tensor[rows[0] : rows[1], columns[0] : columns[1]]
    value = to_hex(fingerprint(part, rows[0], columns[0]))
    return {"place": place, "rows": rows, "columns": columns, "fingerprint": value, "exact": True}


def worker(*shares: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tensors": {"w": list(shares)}, "shapes": {"w": [8, 6]}, "unaccounted": [], "moved": [], **more}


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def sent(tensor: torch.Tensor) -> dict[str, str]:
    return {"w": to_hex(fingerprint(tensor))}


def test_a_tensor_cut_by_rows_by_columns_or_repeated_is_accepted(tensor, sent):
    by_rows = [worker(share(tensor, (0, 4), (0, 6))), worker(share(tensor, (4, 8), (0, 6)))]
    by_columns = [worker(share(tensor, (0, 8), (0, 3))), worker(share(tensor, (0, 8), (3, 6)))]
    repeated = [worker(share(tensor, (0, 8), (0, 6)))] * 3
    pairs = [by_rows[0], by_rows[0], by_rows[1], by_rows[1]]  # heads shared by two workers each
    for loaded in (by_rows, by_columns, repeated, pairs):
        report = compare(sent=sent, loaded=loaded)
        assert report.ok, str(report)


def test_a_missing_a_wrong_and_a_repeated_part_are_refused(tensor, sent):
    half = worker(share(tensor, (0, 4), (0, 6)))
    other = worker(share(tensor + 1, (0, 8), (0, 6)))
    for loaded, reason in [
        ([half], "do not cover"),
        ([half, half], "do not cover"),
        ([other], "fingerprint"),
        ([worker(share(tensor, (0, 8), (0, 6))), other], "worker 1 has other values than its replica"),
        ([worker()], "no location"),
        ([], "no worker answered"),
    ]:
        report = compare(sent=sent, loaded=loaded)
        assert not report.ok
        assert reason in report.mismatched["w"]


def test_places_that_differ_inexact_values_and_parameters_without_explanation_fail(tensor, sent):
    whole = share(tensor, (0, 8), (0, 6))
    stale = share(tensor * 2, (0, 8), (0, 6), "lm_head.weight as packed")
    for loaded, reason in [
        (worker(whole, stale), "lm_head.weight as packed"), (worker({**whole, "exact": False}), "do not fit"),
        (worker(whole, unaccounted=["new.bias"]), "new.bias"), (worker(whole, moved=["layer"]), "layer"),
    ]:  # fmt: skip
        report = compare(sent=sent, loaded=[loaded])
        assert not report.ok
        assert reason in str(report)
    assert "was not sent" in compare(sent={}, loaded=[worker(whole)]).mismatched["w"]
    assert not compare(sent={}, loaded=[{"tensors": {}, "shapes": {}}]).ok, "a probe of nothing"


def test_logprobs_within_the_tolerance_of_the_less_exact_side_pass_and_others_fail(tensor, sent):
    loaded = [worker(share(tensor, (0, 8), (0, 6)))]
    pairs = [pair for dtype in TOLERANCES for pair in (("float32", dtype), (dtype, "float32"))]
    for pair in pairs:
        tolerance = max((TOLERANCES[dtype] for dtype in pair), key=lambda tolerance: tolerance.mean)
        near, far = [-1.0 + tolerance.mean / 2] * 4, [-1.0 + tolerance.mean * 2] * 4
        verdicts = [
            compare(sent=sent, loaded=loaded, trainer_logprobs=[-1.0] * 4, engine_logprobs=engine, precisions=pair).ok
            for engine in (near, far)
        ]
        assert verdicts == [True, False]


@pytest.mark.parametrize(("engine", "dtype"), [
    ([-2.0] * 99 + [-2.1], "float32"), ([float("nan")] + [-2.0] * 99, "bfloat16"),
    ([-2.0] * 99 + [float("-inf")], "bfloat16"),
])  # fmt: skip
def test_one_token_far_off_and_nan_fail_and_different_texts_cannot_be_compared(engine, dtype):
    assert not compare_logprobs([-2.0] * 100, engine, [dtype]).ok
    with pytest.raises(ValueError, match="2 logprobs of the trainer with 100"):
        compare_logprobs([0.0, 0.0], engine, [dtype])


def test_the_message_names_the_tensors_and_keeps_its_length():
    sent = {f"layer.{i}": "0" * 16 for i in range(100)}
    message = str(compare(sent=sent, loaded=[]))
    assert "layer.0" in message
    assert "and 96 more" in message


@pytest.mark.parametrize(("prompt", "max_model_len", "text"), [
    ([5], 64, [5, 5]), ([5, 6], 64, [5, 6]), (list(range(90)), 512, list(range(64))), ([5, 6, 7, 8], 4, [5, 6, 7]),
])  # fmt: skip
def test_the_text_of_a_probe_has_a_token_with_a_logprob(prompt, max_model_len, text):
    assert probe_text(prompt, max_model_len) == text
