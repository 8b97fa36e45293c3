"""Routed experts of a real vLLM server (`router_replay`) against those of transformers. Run by hand on a GPU.

Without GPUs, `TELESCOPE_TEST_VLLM_PYTHON` has to name a Python with a CPU build of vLLM before 0.31: newer ones refuse.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.client import ask_for_json
from tests.integration.weights.vllm_server import Server, disturb, make_model, serving
from transformers import PreTrainedModel

from telescope.inference.base import GenerateRequest, Generation
from telescope.inference.client import EngineClient

pytestmark = pytest.mark.gpu

LAYERS, TOP_K = 2, 2
AGREEING = 0.97
"""Least share of equal choices. Attention of the GPU multiplies in TF32, so that few near ties go to other experts."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Experts in the first layer alone, and the trainer's model on the same GPU."""
    folder = tmp_path_factory.mktemp("routes")
    gpu = torch.cuda.device_count() - 1 if torch.cuda.is_available() else None
    model = make_model(folder, tied=False, architecture="qwen3_moe", head_dim=64, expert_size=128)
    if gpu is not None:
        model = model.to(f"cuda:{gpu}")
    with serving(Server(model, folder, gpu=gpu, staged=True, router_replay=True)) as made:
        yield made


@torch.no_grad()
def own_routes(model: PreTrainedModel, token_ids: list[int]) -> np.ndarray:
    """The experts [L, K] that transformers chooses in the first layer, sorted."""
    found: list[torch.Tensor] = []
    hook = model.model.layers[0].mlp.gate.register_forward_hook(lambda gate, args, outputs: found.append(outputs[2]))
    model(torch.tensor(token_ids, device=model.device)[None])
    hook.remove()
    return np.sort(found[0].cpu().numpy(), axis=-1)


def request(name: str, prompt: list[int], num_tokens: int, **options: Any) -> GenerateRequest:
    return GenerateRequest(name, prompt, num_tokens, 1.0, seed=3, ignore_eos=True, **options)


def agreement(server: Server, sent: GenerateRequest, answer: Generation) -> float:
    """Share of tokens whose experts are those of the model. Fails for routes of other tokens or layers."""
    tokens = sent.prompt_token_ids + answer.token_ids_N.tolist()
    routes = answer.routes_MXK
    assert routes.shape == (len(tokens) - 1 - sent.routes_start, LAYERS, TOP_K)
    assert not routes[:, 1].any(), "the second layer has no experts"
    wanted = own_routes(server.model, tokens)[sent.routes_start : -1]
    return float((np.sort(routes[:, 0], axis=-1) == wanted).all(axis=-1).mean())


@pytest.mark.first_on_its_server
def test_answers_have_the_experts_that_the_model_chooses(server: Server) -> None:
    sent = [
        request(f"r{i}", [(7 * j + 11 * i) % 280 for j in range(5 + 9 * i)], num_tokens=20 + 5 * i) for i in range(6)
    ]

    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(*(server.client.generate(each) for each in sent))

    answers = server.run(all_at_once())
    assert [len(answer.token_ids_N) for answer in answers] == [each.max_tokens for each in sent]
    for each, answer in zip(sent, answers, strict=True):
        assert agreement(server, each, answer) >= AGREEING


def test_a_later_turn_gets_the_routes_that_it_asks_for_packed_or_in_json(server: Server) -> None:
    first = request("turn 0", [(5 * i + 2) % 280 for i in range(40)], 30)
    answer = server.run(server.client.generate(first))
    before = first.prompt_token_ids + answer.token_ids_N.tolist()
    prompt = [*before, 3, 1, 4, 1, 5]
    later = request("turn 1", prompt, 20, routes_start=len(before) - 1)
    packed = server.run(server.client.generate(later))
    assert agreement(server, later, packed) >= AGREEING
    plain = ask_for_json(EngineClient(server.client.base_url, "s" * 32, 0))
    (whole, in_json) = (server.run(plain.generate(each)) for each in (request("whole", prompt, 20), later))
    server.run(plain.close())
    assert whole.routes_MXK is not None and in_json.routes_MXK is not None and packed.routes_MXK is not None
    assert whole.token_ids_N.tolist() == in_json.token_ids_N.tolist()
    assert agreement(server, request("", prompt, 20), whole) >= AGREEING
    assert in_json.routes_MXK.dtype == packed.routes_MXK.dtype
    np.testing.assert_array_equal(in_json.routes_MXK, whole.routes_MXK[len(before) - 1 :])


def test_after_a_sync_a_known_prompt_has_the_routes_of_the_new_weights(server: Server) -> None:
    sent = request("old", [(3 * i + 1) % 280 for i in range(120)], 40)
    old = server.run(server.client.generate(sent))
    assert agreement(server, sent, old) >= AGREEING
    disturb(server.model, seed=7)
    server.verified_sync()
    assert agreement(server, sent, old) < AGREEING, "the weights changed what is chosen"
    again = request("new", sent.prompt_token_ids, 40)
    assert agreement(server, again, server.run(server.client.generate(again))) >= AGREEING
