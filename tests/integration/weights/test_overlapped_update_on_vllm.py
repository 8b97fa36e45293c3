"""Weights received beside the work of a real vLLM server: what it computes with, and when, and what the probe sees.

`tests/gpu/weights/test_overlapped_update_on_gpu.py` makes the same claims of an engine on a GPU.
"""

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.integration.weights.vllm_server import (
    PROBE_TOKENS,
    Server,
    distance,
    disturb,
    make_model,
    model_logprobs,
    serving,
)

from telescope.errors import InfrastructureError
from telescope.inference.base import GenerateRequest

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One vLLM process per kind of model; every test brings it to a state of its own by a sync."""
    folder = tmp_path_factory.mktemp(request.param)
    with serving(Server(make_model(folder, tied=request.param == "tied"), folder, unpacked=True)) as made:
        yield made


def half_way(server: Server, action: Callable[[], object]) -> Iterator[tuple[str, torch.Tensor]]:
    """The trainer's tensors, with something done after the seventh, when the first buckets have been received."""
    for index, item in enumerate(server.model.named_parameters()):
        if index == 7:
            action()
        yield item


@pytest.mark.parametrize(("mode", "bucket_mb"), [("flattened_bucket", 1), ("flattened_bucket", 256), ("per_tensor", 1)])
def test_after_a_background_sync_the_engine_computes_with_the_new_weights(server, mode, bucket_mb):
    assert server.background
    server.check_new_weights(mode, bucket_mb)


def test_the_engine_samples_from_the_old_weights_until_the_swap(server):
    server.verified_sync()
    old = model_logprobs(server.model, PROBE_TOKENS)
    disturb(server.model, seed=server.version + 1)
    update = server.next_update(mode="per_tensor")
    during: list[list[float]] = []
    request = GenerateRequest("beside", PROBE_TOKENS[:8], max_tokens=40, temperature=1.0, seed=1)

    async def ask() -> None:
        """Runs on the loop that also waits for the transfer, which goes on only when both answers are here."""
        generation = await server.client.generate(request)
        assert generation.version_spans == [(update.version - 1, 0, len(generation.token_ids_N))]
        during.append(await server.client.prompt_logprobs(PROBE_TOKENS))

    report = server.receive(
        update, half_way(server, lambda: asyncio.run_coroutine_threadsafe(ask(), server.loop).result(60))
    )
    assert report.errors == {}
    assert server.has(old), "all of the new weights had arrived"
    assert server.has(during[0]), "half of them had arrived"
    server.run(server.swap(update))
    assert server.probe(report).ok
    assert distance(server.logprobs(), old) > 0.1


@pytest.mark.parametrize(("fault", "name"), [
    pytest.param("nothing", "", marks=pytest.mark.slow),
    ("no swap", ""),
    pytest.param("skipped", "model.layers.0.self_attn.k_proj.weight", marks=pytest.mark.slow),
    ("skipped", "model.norm.weight"),
    pytest.param("previous", "model.embed_tokens.weight", marks=pytest.mark.slow),
    ("swapped", "model.layers.0.mlp.gate_proj.weight"),
    pytest.param("bit", "model.layers.1.mlp.up_proj.weight", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_probe_names_the_tensors_of_a_corrupted_overlapped_sync_and_the_next_sync_repairs_it(server, fault, name):
    server.check_corrupted(fault, name)


def test_an_overlapped_transfer_that_failed_changes_nothing_and_the_next_one_repairs_it(server):
    server.verified_sync()
    old = model_logprobs(server.model, PROBE_TOKENS)
    disturb(server.model, seed=server.version + 1)
    update = server.next_update(mode="per_tensor")
    report = server.receive(update, half_way(server, lambda: server.sender.abort(0, "half way, on purpose")))
    assert "half way" in report.errors[0]
    assert server.has(old)
    with pytest.raises(InfrastructureError, match="half way"):
        server.run(server.swap(update))
    assert server.has(old)
    server.connect()
    server.verified_sync()


def kill_in_a_background_sync(server: Server) -> None:
    """Its processes end half way: the sender must learn of it at once."""
    started = time.monotonic()
    update = server.next_update(mode="per_tensor")
    report = server.receive(update, half_way(server, server.process.kill))
    assert "exited" in report.errors[0] or "broke" in report.errors[0]
    assert time.monotonic() - started < 30  # the deadline is 60


@pytest.mark.last_on_its_server
def test_killing_the_engine_in_the_middle_of_a_background_sync_is_an_error_at_once(server):
    kill_in_a_background_sync(server)
