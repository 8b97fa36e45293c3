"""Transfers over gloo between this process, as the sender, and processes that stand in for engine workers."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.integration.weights.transfer_harness import Engines, expected, update_of, weights

from telescope.weights.plan import plan_buckets
from telescope.weights.sender import WeightSender


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.close()


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return weights()


def test_both_modes_and_dtypes_arrive_bit_for_bit_on_every_worker_of_an_engine(tensors, engines):
    updates = [
        update_of(tensors, version=1, mode="flattened_bucket", dtype="float32"),
        update_of(tensors, version=2, mode="per_tensor", dtype="bfloat16"),
        update_of(tensors, version=3, mode="flattened_bucket", dtype="float16"),
    ]
    peers = engines.start(0, updates, devices=("cpu", "cpu"))
    reports = [engines.sender.send(iter(tensors.items()), u, [0], fingerprints=True) for u in updates]
    answers = peers.answers()
    assert [r.errors for r in reports] == [{}, {}, {}]
    for report, num_buckets in zip(reports, (2, 4, 1), strict=True):
        phases = [span.name.removeprefix("weight_broadcast_") for span in report.spans]
        assert phases == ["agree", *["wait", "gather"] * num_buckets, "wait", "conclude"]
    for index, (report, dtype) in enumerate(zip(reports, (torch.float32, torch.bfloat16, torch.float16), strict=True)):
        assert report.fingerprints == expected(tensors, dtype)
        assert answers[index]["loaded"] == answers[index + 3]["loaded"] == report.fingerprints


@pytest.mark.parametrize("mode", ["flattened_bucket", "per_tensor"])
def test_a_tensor_that_engines_keep_in_float32_is_not_rounded(tensors, engines, mode):
    update = update_of(tensors, dtype="bfloat16", mode=mode, exact="a.bias")
    peers = engines.start(0, [update])
    report = engines.sender.send(iter(tensors.items()), update, [0], fingerprints=True)
    rounded, whole = expected(tensors, torch.bfloat16), expected(tensors, torch.float32)
    assert report.fingerprints == peers.answers()[0]["loaded"] == rounded | {"a.bias": whole["a.bias"]}


def test_engines_that_exit_or_fail_are_reported_at_once_and_others_get_weights(tensors, engines):
    update = update_of(tensors, timeout_seconds=60.0)
    for engine, fault in enumerate(("die", "die before", "raise")):
        engines.start(engine, [update], fault=fault)
    healthy = engines.start(3, [update, replace(update, version=2)])
    report = engines.sender.send(iter(tensors.items()), update, [0, 1, 2, 3])
    again = engines.sender.send(iter(tensors.items()), replace(update, version=2), [3])
    assert sorted(report.errors) == [0, 1, 2]
    assert "does not fit" in report.errors[2]
    assert again.errors == {}
    assert [answer["loaded"] for answer in healthy.answers()] == [expected(tensors, torch.float32)] * 2


def test_a_hanging_engine_only_costs_its_deadline(tensors, engines):
    update = update_of(tensors, timeout_seconds=2.0)
    engines.start(0, [update], fault="hang")
    report = engines.sender.send(iter(tensors.items()), update, [0])
    assert "deadline" in report.errors[0]
    assert list(engines.sender.send(iter(tensors.items()), update, [0]).errors) == [0], "it must connect anew"


def test_others_get_weights_while_engines_hang(tensors, engines):
    update = update_of(tensors, timeout_seconds=8.0)
    for engine in (0, 1):
        engines.start(engine, [update], fault="hang before")
    healthy = engines.start(2, [update])
    report = engines.sender.send(iter(tensors.items()), update, [0, 1, 2])
    assert sorted(report.errors) == [0, 1]
    assert "weight_sync_timeout_seconds is 8" in report.errors[0]
    assert [answer["loaded"] for answer in healthy.answers()] == [expected(tensors, torch.float32)]


def test_abort_from_another_thread_frees_a_blocked_sender(tensors, engines):
    update = update_of(tensors, timeout_seconds=60.0)
    engines.start(0, [update], fault="hang")
    threading.Timer(0.5, engines.sender.abort, (0, "the driver gave the server up")).start()
    report = engines.sender.send(iter(tensors.items()), update, [0])
    assert "gave the server up" in report.errors[0]


def test_two_sides_that_expect_different_transfers_refuse_before_a_tensor_moves(tensors, engines):
    update = update_of(tensors)
    peers = engines.start(0, [replace(update, shapes=[[300, 700], *update.shapes[1:]])])
    report = engines.sender.send(iter(tensors.items()), update, [0])
    assert "expects transfer" in report.errors[0]
    assert "expects transfer" in str(peers.answers()[0]["error"])


def test_a_peer_is_notified_at_once_when_the_sender_exits(tensors, engines):
    update = update_of(tensors, timeout_seconds=60.0)
    peers = engines.start(0, [update])
    time.sleep(0.2)
    engines.sender.disconnect(0, "the trainer ends")
    assert "the trainer ends" in str(peers.answers()[0]["error"])


def test_staging_waits_for_copies_from_the_gpu_that_has_the_weights(engines, monkeypatch):
    waited: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.synchronize = lambda: waited.append(device)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    engines.sender = WeightSender(device="cuda:1", cpu_staging=True, pin_memory=False, track_spans=False)
    tensors = weights()
    peers = engines.start(0, [update_of(tensors)])
    engines.sender.send(iter(tensors.items()), update_of(tensors), [0])
    assert peers.answers()[0]["loaded"] == expected(tensors, torch.float32)
    assert waited == [torch.device("cuda:1")] * len(plan_buckets(update_of(tensors)))


def test_an_engine_can_be_connected_anew_after_a_failure(tensors, engines):
    update = update_of(tensors)
    engines.start(0, [update], fault="die")
    assert 0 in engines.sender.send(iter(tensors.items()), update, [0]).errors
    again = engines.start(0, [update])
    assert engines.sender.send(iter(tensors.items()), update, [0]).errors == {}
    assert again.answers()[0]["loaded"] == expected(tensors, torch.float32)


def test_a_trainer_that_yields_other_tensors_than_announced_is_an_error(tensors, engines):
    update = update_of(tensors)
    shuffled = dict(reversed(tensors.items()))
    with pytest.raises(ValueError, match=r"yielded norm\.weight .* instead of embed\.weight"):
        engines.sender.send(iter(shuffled.items()), update, [])


def test_engines_learn_at_once_that_the_trainer_failed_and_the_sender_can_be_closed(tensors, engines):
    update = update_of(tensors, timeout_seconds=60.0)
    peers = engines.start(0, [update])

    def broken():
        yield next(iter(tensors.items()))
        raise RuntimeError("another rank is lost")

    with pytest.raises(RuntimeError, match="another rank is lost"):
        engines.sender.send(broken(), update, [0])
    assert "the trainer failed: another rank is lost" in str(peers.answers()[0]["error"])
    engines.sender.close()
