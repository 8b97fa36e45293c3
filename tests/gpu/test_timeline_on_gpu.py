"""The timeline by CUDA events, the allocator's gauges and NVML's, on a real GPU. Run by hand: `pytest tests/gpu -s`."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.integration.trainer.trainer_cases import build_model, make_config, make_samples
from tests.processes import free_port

from telescope.record.system_metrics import GpuReader, memory_reader
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer
from telescope.utils.timeline import Timeline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda", 0)
SIZE, PRODUCTS = 4096, 40
"""Matrix products of about 0.2 ms each on an H100, in float32 with TF32 off a few ms."""

OF_A_MICRO_BATCH = (
    "data_to_device", "forward", "compute_entropy", "prepare_tensors", "data_to_device", "loss_computation",
    "compute_kl", "backward",
)  # fmt: skip
"""The operations of a micro-batch on the main stream, in the order in which they are enqueued."""


@pytest.fixture
def matrix() -> torch.Tensor:
    made = torch.randn(SIZE, SIZE, device=DEVICE)
    for _ in range(5):
        made @ made
    torch.cuda.synchronize()
    return made


def work(matrix: torch.Tensor, products: int = PRODUCTS) -> None:
    for _ in range(products):
        matrix @ matrix


def test_spans_of_enqueued_work_add_up_to_the_wall_time_of_the_device(matrix: torch.Tensor) -> None:
    timeline = Timeline(DEVICE, 0)
    started = time.time()
    for index in range(4):
        with timeline.span("forward", index):
            work(matrix)
    launched = time.time() - started
    torch.cuda.synchronize()
    ended = time.time()
    wall = ended - started
    spans = timeline.finish()
    total = sum(span.end - span.start for span in spans)
    bound = 0.01 * wall + 0.5e-3
    print(f"\n4 spans: {total * 1e3:.3f} ms, wall {wall * 1e3:.3f} ms, launched in {launched * 1e3:.3f} ms, ", end="")
    print(f"difference {abs(total - wall) * 1e3:.3f} ms, bound {bound * 1e3:.3f} ms")
    assert launched < wall / 2, "the host went ahead of the device, or this test shows nothing"
    assert abs(total - wall) <= bound
    assert all(earlier.end <= later.start + 1e-6 for earlier, later in pairwise(spans))
    print(f"first span begins {(spans[0].start - started) * 1e6:.0f} us after the host asked, ", end="")
    print(f"last ends {(ended - spans[-1].end) * 1e6:.0f} us before the host knew")
    assert started - 1e-3 <= spans[0].start
    assert abs(ended - spans[-1].end) <= 2e-3


def test_a_timeline_that_begins_while_the_device_is_busy_is_on_wall_time_too(matrix: torch.Tensor) -> None:
    work(matrix, 4 * PRODUCTS)
    timeline = Timeline(DEVICE, 0)
    with timeline.span("forward"):
        work(matrix)
    torch.cuda.synchronize()
    with timeline.span("optimizer"):
        work(matrix)
    torch.cuda.synchronize()
    ended = time.time()
    forward, optimizer = timeline.finish()
    assert abs(ended - optimizer.end) <= 2e-3
    assert forward.end <= optimizer.start + 1e-6


def test_a_training_step_is_covered_by_its_spans_in_order(tmp_path: Path) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8}
    path = build_model(tmp_path, num_key_value_heads=4, max_position_embeddings=8192, initializer_range=0.02, **shape)
    dtypes = {"model_dtype": "float32", "mixed_precision_dtype": "bfloat16"}
    trainer = Trainer(
        make_config(path, device="cuda", entropy_chunk_size=1024, **dtypes), 0, 1, "127.0.0.1", free_port()
    )
    trainer.setup()
    try:
        (batch,) = pack_step(
            make_samples([4000] * 16), step=0, version=0, seq_len=4096, num_ranks=1, pad_to_multiple_of=64
        )  # fmt: skip
        for _ in range(3):
            result = trainer.train_step(batch)
    finally:
        trainer.shutdown()
    (step,) = (span for span in result.spans if span.name == "step")
    num_micro_batches = int(result.metrics["micro_batches"])
    order = [*OF_A_MICRO_BATCH * num_micro_batches, "gradient_norm", "optimizer"]
    parts = [span for span in result.spans if span.name in order]
    assert [span.name for span in parts] == order
    assert all(span.start <= span.end for span in parts)
    assert all(earlier.end <= later.start + 1e-6 for earlier, later in pairwise(parts))
    assert step.start - 1e-3 <= parts[0].start
    assert parts[-1].end <= step.end + 1e-3
    wall, covered = step.end - step.start, sum(span.end - span.start for span in parts)
    print(f"\nstep {wall * 1e3:.2f} ms, spans {covered * 1e3:.2f} ms ({covered / wall:.1%}, at least 85 % is wanted)")
    assert 0.85 * wall <= covered <= wall + 2e-3


def test_the_gauges_report_the_allocated_bytes() -> None:
    read = memory_reader(DEVICE)
    torch.empty(1, device=DEVICE)
    before = {reading.name: reading.value for reading in read()}
    loaded = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    started = time.perf_counter()
    after = {reading.name: reading.value for reading in read()}
    print(f"\none reading of the allocator: {(time.perf_counter() - started) * 1e6:.0f} us; {after}")
    name = "torch_memory_allocated_bytes"
    assert after[name] - before[name] == loaded.numel()
    assert after["torch_memory_allocated_peak_bytes"] >= after[name]
    assert after["torch_memory_reserved_bytes"] >= after[name]
    assert after["torch_memory_alloc_retries"] >= 0


def test_nvml_reports_every_gauge_of_every_gpu(matrix: torch.Tensor) -> None:
    reader = GpuReader()
    names = reader.hardware()["gpus"]
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:  # NVML's utilization is of the last second or less
        work(matrix)
        torch.cuda.synchronize()
    started = time.perf_counter()
    readings = list(reader())
    seconds = time.perf_counter() - started
    found = {(reading.gpu, reading.name): reading.value for reading in readings}
    print(f"\n{names}: one reading of all GPUs {seconds * 1e3:.2f} ms; {found}")
    assert {gpu for gpu, _ in found} == set(range(len(names)))
    busiest = max(found[gpu, "gpu_utilization_percent"] for gpu in range(len(names)))
    assert busiest > 50
    for gpu in range(len(names)):
        assert 0 < found[gpu, "gpu_memory_used_bytes"] < found[gpu, "gpu_memory_total_bytes"]
        assert 0 < found[gpu, "gpu_temperature_celsius"] < 120
        assert 0 < found[gpu, "gpu_power_watts"] < 2 * found[gpu, "gpu_power_limit_watts"]
        assert found[gpu, "gpu_sm_clock_mhz"] > 0
        assert found[gpu, "gpu_memory_clock_mhz"] > 0
