"""Weights into real vLLM servers with experts (Qwen3-MoE) and of two tensor-parallel workers, and the probe of them.

The model has a layer with experts and one without. One server per shape, for all claims;
`tests/gpu/weights/test_experts_and_ranks_on_gpu.py` makes the same ones of engines on GPUs.
"""

import time
from collections.abc import Iterator

import pytest
from tests.integration.weights.vllm_server import (
    PROBE_TOKENS,
    Server,
    distance,
    disturb,
    make_model,
    model_logprobs,
    names_of,
    serving,
)

from telescope.errors import InfrastructureError
from telescope.inference.base import GenerateRequest
from telescope.inference.vllm.support import parse_version

pytestmark = pytest.mark.e2e

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(
    scope="module", params=["tied, two workers", pytest.param("untied, one worker", marks=pytest.mark.slow)]
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One vLLM server per kind of model; every test brings it to a state of its own by a sync."""
    folder = tmp_path_factory.mktemp("experts")
    workers = 2 if "two workers" in request.param else 1
    # The CPU's kernel pads the rows of an expert to a multiple of 32: on one worker here, and not on two.
    model = make_model(
        folder, tied=request.param.startswith("tied"), architecture="qwen3_moe", expert_size=64 if workers == 2 else 80
    )
    with serving(Server(model, folder, tensor_parallel=workers)) as made:
        yield made


@pytest.mark.first_on_its_server
def test_before_any_sync_it_samples_with_the_logprobs_of_the_model_that_it_loaded(server):
    assert server.version == 0
    assert server.has_the_models_weights()
    prompt = PROBE_TOKENS[:12]
    answer = server.run(server.client.generate(GenerateRequest("first", prompt, 24, 1.0, seed=3)))
    sampled = answer.token_ids_N.tolist()
    wanted = model_logprobs(server.model, prompt + sampled)[len(prompt) - 1 :]
    assert len(sampled) > 1
    assert distance(answer.logprobs_N.tolist(), wanted) < (1e-4 if server.gpu is None else 2e-2)


def test_every_worker_reports_why_it_is_updated_in_place(server):
    assert len(server.modes) == server.tensor_parallel
    assert not server.background
    reasons = {mode["reason"] for mode in server.modes}
    if server.tensor_parallel > 1:
        assert reasons == {"collectives of a tensor-parallel engine must not run beside a transfer"}
    else:
        assert all(reasons)


def test_a_model_folder_that_every_worker_reads_is_loaded_as_by_a_sync(server, tmp_path):
    disturb(server.model, seed=server.version + 1)
    server.load_folder(tmp_path)
    assert server.has_the_models_weights()


@pytest.mark.parametrize(("mode", "bucket_mb"), [("flattened_bucket", 1), ("flattened_bucket", 256), ("per_tensor", 1)])
def test_after_a_sync_the_engine_computes_with_the_new_weights(server, mode, bucket_mb):
    server.check_new_weights(mode, bucket_mb)


@pytest.mark.parametrize(("fault", "name", "rank"), [
    pytest.param("nothing", "", 0, marks=pytest.mark.slow),
    ("skipped", f"{EXPERTS}.1.up_proj.weight", 1),
    pytest.param("skipped", f"{EXPERTS}.3.down_proj.weight", 0, marks=pytest.mark.slow),
    pytest.param("skipped", "model.layers.0.mlp.gate.weight", 1, marks=pytest.mark.slow),
    pytest.param("skipped", "model.layers.1.mlp.down_proj.weight", 0, marks=pytest.mark.slow),
    pytest.param("skipped", "model.layers.1.self_attn.k_norm.weight", 1, marks=pytest.mark.slow),
    pytest.param("skipped", "model.embed_tokens.weight", 1, marks=pytest.mark.slow),
    pytest.param("previous", f"{EXPERTS}.2.gate_proj.weight", 0, marks=pytest.mark.slow),
    pytest.param("previous", "model.layers.1.self_attn.v_proj.weight", 1, marks=pytest.mark.slow),
    ("swapped", f"{EXPERTS}.2.gate_proj.weight", 1),
    pytest.param("swapped", f"{EXPERTS}.0.down_proj.weight", 0, marks=pytest.mark.slow),
    pytest.param("swapped", "model.layers.0.self_attn.q_proj.weight", 0, marks=pytest.mark.slow),
    pytest.param("swapped", "model.layers.1.mlp.gate_proj.weight", 0, marks=pytest.mark.slow),
    ("bit", f"{EXPERTS}.3.down_proj.weight", -1),  # the bit is in the last column, on the last worker
])  # fmt: skip
def test_the_probe_names_the_wrong_tensors_of_one_worker_and_the_next_sync_repairs_it(server, fault, name, rank):
    server.check_corrupted(fault, name, rank % server.tensor_parallel)


def test_experts_that_are_not_packed_again_are_caught(server):
    if server.gpu is not None or server.tensor_parallel == 1:
        return  # a kernel that computes with the weights as they are loaded, or one that pads: there it is an error
    if parse_version(server.vllm_version) < (0, 32):
        return  # nothing to forget: its experts are made ready whenever they are loaded
    disturb(server.model, seed=server.version + 1)
    server.fault("unpacked", rank=server.tensor_parallel - 1)
    corrupted = server.sync().probe
    assert {name for name in names_of(server.model) if EXPERTS in name} == set(corrupted.mismatched)
    server.verified_sync()


def test_a_transfer_that_failed_half_way_is_repaired_by_the_next_one(server):
    disturb(server.model, seed=server.version + 1)
    with pytest.raises(InfrastructureError, match="half way"):
        server.break_off()
    server.connect()
    server.verified_sync()
    assert server.has_the_models_weights()


def test_a_failed_load_in_one_worker_fails_the_sync_and_closes_every_update(server):
    disturb(server.model, seed=server.version + 1)
    server.fault("raise", rank=server.tensor_parallel - 1)
    with pytest.raises(InfrastructureError, match="on purpose"):
        server.sync()
    server.connect()
    server.verified_sync()
    assert server.has_the_models_weights()


@pytest.mark.last_on_its_server
def test_killing_a_worker_during_a_sync_fails_at_once_and_ends_its_server(server):
    started = time.monotonic()
    failure, report = server.worker_killed_in_a_sync()
    assert isinstance(failure, InfrastructureError)
    assert "exited" in report.errors[0] or "broke" in report.errors[0]
    assert time.monotonic() - started < 30  # the deadline is 60
    while server.process.poll() is None:
        assert time.monotonic() - started < 240, "the server goes on without one of its workers"
        time.sleep(0.1)
