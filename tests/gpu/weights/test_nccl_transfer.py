"""The same transfers over NCCL between two GPUs, and over gloo with CPU staging on one. Run by hand on GPUs."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.integration.weights.transfer_harness import Engines, expected, update_of, weights

from telescope.weights.sender import WeightSender

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two ranks on one GPU")


@pytest.fixture
def nccl() -> Iterator[Engines]:
    made = Engines(device="cuda:0")
    yield made
    made.close()


@pytest.fixture
def staged() -> Iterator[Engines]:
    made = Engines(device="cuda:0", cpu_staging=True)
    yield made
    made.close()


def on_gpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cuda:0") for name, tensor in tensors.items()}


@two_gpus
def test_nccl_delivers_bit_for_bit(nccl: Engines) -> None:
    tensors = on_gpu(weights())
    updates = [update_of(tensors), update_of(tensors, version=2, mode="per_tensor", dtype="bfloat16")]
    peers = nccl.start(0, updates, devices=("cuda:1",))
    reports = [nccl.sender.send(iter(tensors.items()), update, [0], fingerprints=True) for update in updates]
    assert [report.errors for report in reports] == [{}, {}]
    loaded = [answer["loaded"] for answer in peers.answers()]
    assert loaded == [expected(tensors, torch.float32), expected(tensors, torch.bfloat16)]
    assert loaded == [report.fingerprints for report in reports]
    for report in reports:
        assert [span.name for span in report.spans][-1] == "weight_broadcast_conclude"
        assert sum(span.end - span.start for span in report.spans) > 0


@two_gpus
@pytest.mark.parametrize("fault", ["die", "die before", "raise"])
def test_an_exited_peer_is_an_error_at_once_and_can_be_replaced(nccl: Engines, fault: str) -> None:
    tensors = on_gpu(weights())
    update = update_of(tensors, timeout_seconds=120.0)
    nccl.start(0, [update], devices=("cuda:1",), fault=fault)
    report = nccl.sender.send(iter(tensors.items()), update, [0])
    assert list(report.errors) == [0]
    again = nccl.start(0, [update], devices=("cuda:1",))
    assert nccl.sender.send(iter(tensors.items()), update, [0]).errors == {}
    assert again.answers()[0]["loaded"] == expected(tensors, torch.float32)


@two_gpus
def test_a_hanging_peer_ends_at_the_deadline_or_an_abort(nccl: Engines) -> None:
    tensors = on_gpu(weights())
    update = update_of(tensors, mode="per_tensor", timeout_seconds=3.0)
    nccl.start(0, [update], devices=("cuda:1",), fault="hang")
    assert "deadline" in nccl.sender.send(iter(tensors.items()), update, [0]).errors[0]
    slow = replace(update, timeout_seconds=120.0)
    nccl.start(0, [slow], devices=("cuda:1",), fault="hang")
    threading.Timer(1.0, nccl.sender.abort, (0, "given up")).start()
    report = nccl.sender.send(iter(tensors.items()), slow, [0])
    assert "given up" in report.errors[0]
    time.sleep(5)  # NCCL's watchdog, if it were left to act, would have ended this process by now
    assert float(torch.ones(4, device="cuda:0").sum()) == 4.0


def test_cpu_staging_delivers_bit_for_bit_to_the_same_gpu(staged: Engines) -> None:
    tensors = on_gpu(weights())
    update = update_of(tensors, dtype="bfloat16")
    peers = staged.start(0, [update], devices=("cuda:0",))
    report = staged.sender.send(iter(tensors.items()), update, [0], fingerprints=True)
    assert report.errors == {}
    assert peers.answers()[0]["loaded"] == expected(tensors, torch.bfloat16) == report.fingerprints


def big_sync(engines: Engines, device: str, bucket_mb: int) -> None:
    """Prints the report of a sync of 4 GiB in bfloat16, the second of two (the first one warms up)."""
    tensors = {f"t{i}": torch.randn(4096, 4096, device="cuda:0", dtype=torch.bfloat16) for i in range(128)}
    updates = [update_of(tensors, version=v, dtype="bfloat16", bucket_mb=bucket_mb) for v in (1, 2)]
    engines.start(0, updates, devices=(device,))
    reports = [engines.sender.send(iter(tensors.items()), update, [0]) for update in updates]
    print(f"{device} {engines.backend} bucket {bucket_mb} MB: {reports[-1]}")
    assert reports[-1].errors == {}


@two_gpus
def test_four_gib_over_nccl(nccl: Engines) -> None:
    big_sync(nccl, "cuda:1", 256)


def test_four_gib_with_staging(staged: Engines) -> None:
    assert isinstance(staged.sender, WeightSender)
    big_sync(staged, "cuda:0", 256)
