"""Weights from a transformers model into a real vLLM server, and the probe that must not be fooled."""

import time
from collections.abc import Iterator

import pytest
from tests.integration.weights.vllm_server import (
    PROBE_TOKENS,
    Server,
    disturb,
    make_model,
    model_logprobs,
    serving,
)

from telescope.errors import InfrastructureError
from telescope.inference.vllm.support import parse_version

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=["tied", "untied"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One vLLM process per kind of model; every test brings it to a state of its own by a sync."""
    folder = tmp_path_factory.mktemp(request.param)
    with serving(Server(make_model(folder, tied=request.param == "tied"), folder)) as made:
        yield made


@pytest.mark.parametrize(("mode", "bucket_mb"), [("flattened_bucket", 1), ("flattened_bucket", 256), ("per_tensor", 1)])
def test_after_a_sync_the_engine_computes_with_the_new_weights(server: Server, mode: str, bucket_mb: int) -> None:
    before = server.run(server.client.prompt_logprobs(PROBE_TOKENS))
    disturb(server.model, seed=server.version + 1)
    done = server.sync(mode=mode, bucket_mb=bucket_mb)
    assert done.probe.ok, str(done.probe)
    assert done.probe.num_tensors == len(list(server.model.parameters()))
    after = server.run(server.client.prompt_logprobs(PROBE_TOKENS))
    expected = model_logprobs(server.model, PROBE_TOKENS)
    assert max(abs(a - b) for a, b in zip(after, expected, strict=True)) < 1e-4
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.1
    assert done.pause_seconds >= done.report.engine_seconds[0] > 0


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("nothing", ""),
        ("skipped", "model.layers.1.mlp.down_proj.weight"),
        ("skipped", "model.layers.0.self_attn.k_proj.weight"),
        ("skipped", "model.layers.0.self_attn.q_proj.bias"),
        ("skipped", "model.norm.weight"),
        ("skipped", "model.embed_tokens.weight"),
        ("previous", "model.layers.0.self_attn.v_proj.weight"),
        ("previous", "model.embed_tokens.weight"),
        ("swapped", "model.layers.1.self_attn.q_proj.weight"),
        ("swapped", "model.layers.0.mlp.gate_proj.weight"),
        ("bit", "model.layers.1.mlp.up_proj.weight"),
        ("bit", "model.layers.1.input_layernorm.weight"),
    ],
)
def test_the_probe_names_what_a_spoiled_sync_left_wrong_and_the_next_sync_mends_it(
    server: Server, fault: str, name: str
) -> None:
    corrupted = server.corrupted_sync(fault, name)
    assert not corrupted.ok
    every = {name for name, _ in server.model.named_parameters()}
    swapped_with = name.replace("q_proj", "k_proj").replace("gate_proj", "up_proj")
    wrong = every if fault == "nothing" else {name, swapped_with} if fault == "swapped" else {name}
    assert set(corrupted.mismatched) == wrong
    server.proven_sync()


def test_a_tied_output_layer_that_is_not_processed_again_is_caught(server: Server) -> None:
    if not server.model.config.tie_word_embeddings or parse_version(server.vllm_version) < (0, 32):
        return  # nothing to forget: no tie, or one layer that is both (as Qwen2 is in 0.26)
    disturb(server.model, seed=server.version + 1)
    server.fault("tie")
    stale = server.sync().probe
    assert set(stale.mismatched) == {"model.embed_tokens.weight"}
    assert "lm_head.weight as packed" in stale.mismatched["model.embed_tokens.weight"]
    assert stale.logprobs is not None
    assert stale.logprobs.maximum > 0.1
    server.proven_sync()


def test_a_transfer_that_broke_off_half_way_is_mended_by_the_next_one(server: Server) -> None:
    disturb(server.model, seed=server.version + 1)
    with pytest.raises(InfrastructureError, match="half way"):
        server.break_off()
    server.connect()
    server.proven_sync()


@pytest.mark.last_on_its_server
def test_killing_the_engine_in_the_middle_of_a_sync_is_an_error_at_once(server: Server) -> None:
    started = time.monotonic()
    failure, report = server.killed_in_a_sync()
    assert isinstance(failure, InfrastructureError)
    assert "gone" in report.errors[0] or "broke" in report.errors[0]
    assert time.monotonic() - started < 30  # the deadline is 60
