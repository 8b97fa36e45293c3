"""Weights from a transformers model into a real vLLM server, and the probe that must not be fooled."""

import asyncio
import itertools
import time
from collections.abc import Iterator

import pytest
from tests.fakes.client import metrics_of
from tests.integration.weights.vllm_server import Server, disturb, make_model, serving

from telescope.errors import InfrastructureError, RunError
from telescope.inference.base import GenerateRequest
from telescope.inference.vllm import adapter as wire
from telescope.inference.vllm.support import parse_version

pytestmark = pytest.mark.e2e

NUM_RUNNING = 80
"""Requests that are in the engine, or on their way there, when the sync begins in which it is killed."""


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One vLLM process per kind of model; every test brings it to a state of its own by a sync."""
    if request.param == "tied":
        yield request.getfixturevalue("tied_server")
        return
    folder = tmp_path_factory.mktemp("untied")
    with serving(Server(make_model(folder, tied=False), folder)) as made:
        yield made


@pytest.mark.parametrize(("mode", "bucket_mb"), [("flattened_bucket", 1), ("flattened_bucket", 256), ("per_tensor", 1)])
def test_after_a_sync_the_engine_computes_with_the_new_weights(server, mode, bucket_mb):
    done = server.check_new_weights(mode, bucket_mb)
    assert done.pause_seconds >= done.report.engine_seconds[0] > 0


def test_a_model_folder_that_the_engine_reads_itself_is_loaded_as_by_a_sync(server, tmp_path):
    disturb(server.model, seed=server.version + 1)
    server.load_folder(tmp_path)
    assert server.has_the_models_weights()
    server.fault("skipped", "model.norm.weight")
    disturb(server.model, seed=server.version + 1)
    with pytest.raises(RunError, match=r"has not loaded the weights of .*model\.norm\.weight"):
        server.load_folder(tmp_path)
    server.verified_sync()


@pytest.mark.parametrize(("fault", "name"), [
    pytest.param("nothing", "", marks=pytest.mark.slow),
    pytest.param("skipped", "model.layers.1.mlp.down_proj.weight", marks=pytest.mark.slow),
    ("skipped", "model.layers.0.self_attn.k_proj.weight"),
    pytest.param("skipped", "model.layers.0.self_attn.q_proj.bias", marks=pytest.mark.slow),
    pytest.param("skipped", "model.norm.weight", marks=pytest.mark.slow),
    pytest.param("skipped", "model.embed_tokens.weight", marks=pytest.mark.slow),
    pytest.param("previous", "model.layers.0.self_attn.v_proj.weight", marks=pytest.mark.slow),
    pytest.param("previous", "model.embed_tokens.weight", marks=pytest.mark.slow),
    ("swapped", "model.layers.1.self_attn.q_proj.weight"),
    pytest.param("swapped", "model.layers.0.mlp.gate_proj.weight", marks=pytest.mark.slow),
    pytest.param("bit", "model.layers.1.mlp.up_proj.weight", marks=pytest.mark.slow),
    ("bit", "model.layers.1.input_layernorm.weight"),
])  # fmt: skip
def test_the_probe_names_the_tensors_of_a_corrupted_sync_and_the_next_sync_repairs_it(server, fault, name):
    server.check_corrupted(fault, name)


def test_a_tied_output_layer_that_is_not_processed_again_is_caught(server):
    if not server.model.config.tie_word_embeddings or parse_version(server.vllm_version) < (0, 32):
        return  # nothing to forget: no tie, or one layer that is both (as Qwen2 is in 0.26)
    disturb(server.model, seed=server.version + 1)
    server.fault("tie")
    stale = server.sync().probe
    assert set(stale.mismatched) == {"model.embed_tokens.weight"}
    assert "lm_head.weight as packed" in stale.mismatched["model.embed_tokens.weight"]
    assert stale.logprobs.maximum > 0.1
    server.verified_sync()


def test_a_transfer_that_failed_half_way_is_repaired_by_the_next_one(server):
    disturb(server.model, seed=server.version + 1)
    with pytest.raises(InfrastructureError, match="half way"):
        server.break_off()
    server.connect()
    server.verified_sync()


@pytest.mark.last_on_its_server
def test_killing_the_server_in_the_middle_of_a_sync_is_an_error_at_once(server):
    if server.model.config.tie_word_embeddings:
        return  # of this one the engine is killed alone, below
    started = time.monotonic()
    failure, report = server.killed_in_a_sync()
    assert isinstance(failure, InfrastructureError)
    assert "exited" in report.errors[0] or "broke" in report.errors[0]
    assert time.monotonic() - started < 30  # the deadline is 60


@pytest.mark.last_on_its_server
@pytest.mark.parametrize("server", ["tied"], indirect=True)
def test_killing_an_engine_during_a_sync_ends_every_request_and_its_server(server):
    running = [server.loop.create_task(sample_on_and_on(server, f"running-{i}")) for i in range(NUM_RUNNING)]
    server.run(half_in_the_engine(server))
    started = time.monotonic()
    asking = server.loop.create_task(ask_on_and_on(server))
    waiting: list[asyncio.Task[object]] = []  # the server delays it, since it arrives during the pause
    failure, _ = server.core_killed_in_a_sync(
        lambda: waiting.append(server.loop.create_task(sample(server, "waiting", max_tokens=4)))
    )
    assert isinstance(failure, InfrastructureError)
    with pytest.raises(InfrastructureError):
        server.run(asking)
    with pytest.raises(InfrastructureError, match="has exited"):
        server.run(waiting[0])
    assert time.monotonic() - started < 30  # an update may take 60, and a request half an hour
    while server.process.poll() is None:
        assert time.monotonic() - started < 60, "the server goes on without its engine"
        time.sleep(0.1)
    ended = server.run(asyncio.gather(*running, return_exceptions=True))
    assert all(isinstance(answer, InfrastructureError) for answer in ended)
    # vLLM gives them all one exception, to whose traceback each adds its own part.
    assert server.process.log_path.read_text(errors="replace").count("Traceback") < NUM_RUNNING // 4


async def sample(server: Server, name: str, *, max_tokens: int) -> object:
    request = GenerateRequest(request_id=name, prompt_token_ids=[1, 2, 3], max_tokens=max_tokens, temperature=1.0)
    return await server.client.generate(request)


async def sample_on_and_on(server: Server, name: str) -> None:
    """Keeps one request in the engine or on its way there, however fast the engine is, until one fails."""
    for number in itertools.count():
        await sample(server, f"{name}-{number}", max_tokens=200)


async def half_in_the_engine(server: Server) -> None:
    """Waits until the engine has half of the requests that it should have at its exit."""
    async with asyncio.timeout(60):
        num_in_engine = 0.0
        while num_in_engine < NUM_RUNNING / 2:
            metrics = await metrics_of(server.client)
            num_in_engine = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]


async def ask_on_and_on(server: Server) -> object:
    """Returns whether the engine is paused, which it cannot report while it loads weights."""
    while True:
        await server.client._control("GET", wire.IS_PAUSED_ROUTE)
