"""Claims about inference, on a real vLLM."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from tests.e2e.stack.conftest import Stack
from tests.fakes.client import metrics_of
from transformers import AutoTokenizer

from telescope.errors import UserError
from telescope.inference.base import HEALTH_ROUTE, METRICS_ROUTE, GenerateRequest, Generation
from telescope.inference.chat import ChatSettings, Conversation, connect
from telescope.inference.client import EngineClient, EngineRequestError
from telescope.inference.vllm import adapter as wire
from telescope.rollout.rendering import Renderer, RendererSpec

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = [20 + (7 * i) % 200 for i in range(40)]


def client_of(stack: Stack) -> EngineClient:
    return stack.parts.inference.clients[0]


def request(name: str, seed: int = 1, *, temperature: float = 1.0, max_tokens: int = 60, **options) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, max_tokens, temperature, seed=seed, **options)


async def test_no_route_of_the_real_server_answers_without_the_secret(stack: Stack) -> None:
    log = (stack.folder / "parts" / "logs" / "inference-0.log").read_text()
    routes = {
        (method, re.sub(r"\{[^}]*\}", "x", path))
        for path, methods in re.findall(r"Route: (\S+), Methods: ([A-Z, ]+)", log)
        for method in methods.split(", ")
    }
    sockets = set(re.findall(r"Route: (\S+), Endpoint: \S+", log)) | {"/v1/realtime"}
    needed = {HEALTH_ROUTE, METRICS_ROUTE, "/docs", "/openapi.json", wire.PAUSE_ROUTE, wire.GENERATE_ROUTE}
    needed |= {wire.COLLECTIVE_RPC_ROUTE, wire.UPDATE_WEIGHTS_ROUTE, wire.ABORT_ROUTE, wire.INIT_TRANSFER_ROUTE}
    assert needed <= {path for _, path in routes}
    url = client_of(stack).base_url
    async with aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for method, path in [*sorted(routes), ("GET", "/nothing"), ("GET", "/metrics/"), ("OPTIONS", "/pause")]:
                async with session.request(method, url + path, headers=headers) as response:
                    assert response.status == 401, (method, path)
            for path in sockets:
                with pytest.raises(aiohttp.WSServerHandshakeError):
                    await session.ws_connect(url + path, headers=headers)


async def test_a_conversation_is_held_in_the_chat_template_and_ends_with_the_context(stack: Stack) -> None:
    client = connect(client_of(stack).base_url, stack.parts.inference._secret)
    conversation = Conversation(client, stack.parts.config.model, ChatSettings(0.0, 1.0, max_tokens=12))

    def ask(text: str) -> str:
        return "".join(conversation.ask(text))  # how many tokens a chunk holds depends on the load

    first = await asyncio.to_thread(ask, "Use 3, 4 and 5 to make 12")
    assert first
    await asyncio.to_thread(ask, "And 13?")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    conversation.reset()
    assert await asyncio.to_thread(ask, "Use 3, 4 and 5 to make 12") == first  # greedy
    with pytest.raises(UserError, match="reset"):
        await asyncio.to_thread(ask, "7 " * 4000)
    assert len(conversation.messages) == 2


async def sampled(stack: Stack, name: str, temperature: float, top_p: float | None = None) -> list[Generation]:
    """Eight answers under the model's first weights."""
    await stack.parts.trainer.restart()
    await stack.parts.weights.sync()
    requests = [request(f"{name}-{seed}", seed, temperature=temperature, top_p=top_p) for seed in range(8)]
    return list(await asyncio.gather(*(client_of(stack).generate(r) for r in requests)))


class Transformers:
    """The model computed by transformers alone: whole distributions at the places of sampled tokens."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def logprobs_NV(self, generation: Generation, temperature: float) -> torch.Tensor:
        tokens_L = torch.tensor(PROMPT + generation.token_ids_N.tolist())
        with torch.no_grad():
            return torch.log_softmax(self.model(tokens_L[None]).logits[0, len(PROMPT) - 1 : -1] / temperature, -1)


def at_sampled(logprobs_NV: torch.Tensor, generation: Generation) -> np.ndarray:
    ids_N = torch.from_numpy(generation.token_ids_N.astype(np.int64))
    return logprobs_NV.gather(1, ids_N[:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
async def test_engine_trainer_and_transformers_agree_on_logprobs(
    stack: Stack, tiny_model: Path, temperature: float
) -> None:
    """All three mean the distribution that was sampled from."""
    reference = Transformers(tiny_model)
    for generation in await sampled(stack, f"parity-{temperature}", temperature):
        engine_N = generation.logprobs_N
        assert np.abs(at_sampled(reference.logprobs_NV(generation, temperature), generation) - engine_N).max() <= 1e-4
        async with stack.parts.trainer.queue:
            trainer = await stack.parts.trainer.sequence_logprobs(PROMPT + generation.token_ids_N.tolist(), temperature)
        assert np.abs(np.array(trainer)[len(PROMPT) - 1 :] - engine_N).max() <= 1e-4


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.9), (0.7, 0.5)])
async def test_with_top_p_the_engine_reports_renormalized_logprobs(
    stack: Stack, tiny_model: Path, temperature: float, top_p: float
) -> None:
    """The trainer's logprob is of the whole softmax, so the engine's is above it by -log of the kept mass, exactly."""
    reference = Transformers(tiny_model)
    largest = 0.0
    for generation in await sampled(stack, f"top-p-{temperature}", temperature, top_p):
        whole_NV = reference.logprobs_NV(generation, temperature)
        sorted_NV = whole_NV.exp().sort(dim=-1, descending=True).values
        # The most probable tokens, up to the one with which they reach top_p.
        kept_NV = sorted_NV * (sorted_NV.cumsum(dim=-1) - sorted_NV < top_p)
        kept_mass_N = kept_NV.sum(dim=-1).numpy()
        above_N = generation.logprobs_N - at_sampled(whole_NV, generation)
        assert np.abs(above_N + np.log(kept_mass_N)).max() <= 1e-4
        assert above_N.min() >= -1e-4
        assert above_N.max() <= -np.log(top_p) + 1e-4
        largest = max(largest, float(above_N.max()))
    assert largest > 0.01, "no token had another one cut off beside it: the test shows nothing"


async def test_an_answer_depends_on_its_seed_and_not_on_other_requests(stack: Stack) -> None:
    client = client_of(stack)
    order = list(range(64))
    answers = []
    for run in range(2):
        random.Random(run).shuffle(order)
        tasks = {s: asyncio.create_task(client.generate(request(f"order-{run}-{s}", s))) for s in order}
        answers.append({seed: (await task).token_ids_N.tolist() for seed, task in tasks.items()})
    assert answers[0] == answers[1]
    assert len({str(answer) for answer in answers[0].values()}) > 1


@pytest.mark.parametrize("source", ["chat template", "stop_token_ids", "stop"])
async def test_an_answer_stops_where_the_template_or_the_config_ends_a_turn(
    stack: Stack, tiny_model: Path, source: str
) -> None:
    client, tokenizer = client_of(stack), AutoTokenizer.from_pretrained(tiny_model)
    requests = [request(f"free-{source}-{seed}", seed, temperature=2.0) for seed in range(8)]
    answers = [generation.token_ids_N.tolist() for generation in [await client.generate(r) for r in requests]]
    seed = max(range(8), key=lambda seed: len(answers[seed]))
    free = answers[seed]
    end = next(i for i in free[3:-1] if re.fullmatch("[0-9A-Za-z]+", tokenizer.decode([i])))
    name = tokenizer.decode([end])
    options = {"chat template": {"chat_template": "{% for m in messages %}{{ m.content }}" + name + "{% endfor %}"}}
    options |= {"stop_token_ids": {"stop_token_ids": [end]}, "stop": {"stop": [name]}}
    if source == "chat template":
        tokenizer.add_special_tokens({"additional_special_tokens": [name]})
    stops = Renderer(RendererSpec(str(tiny_model), **options[source]), tokenizer).stops
    assert (stops.texts if source == "stop" else stops.token_ids)[0] == (name if source == "stop" else end)
    assert end != tokenizer.eos_token_id

    stopped = await client.generate(
        request("stopped", seed, temperature=2.0, stop_token_ids=stops.token_ids, stop=stops.texts)
    )
    texts = [tokenizer.decode(free[: n + 1]) for n in range(len(free))]
    length = 1 + (next(n for n, text in enumerate(texts) if name in text) if source == "stop" else free.index(end))
    assert stopped.token_ids_N.tolist() == free[:length]
    assert stopped.finish_reason == "stop"
    assert len(stopped.logprobs_N) == length < len(free)


async def test_an_aborted_request_stops_in_the_engine(stack: Stack) -> None:
    client = client_of(stack)
    names = [f"abort-{i}" for i in range(16)]
    tasks = [asyncio.create_task(client.generate(request(n, i, temperature=2.0))) for i, n in enumerate(names)]
    await asyncio.sleep(0)
    await client.abort(names)
    reasons = {(await task).finish_reason for task in tasks}
    assert reasons <= {"abort", "stop", "length"}
    alone = await client.generate(request("after-abort"))
    assert alone.finish_reason in ("stop", "length")
    assert not client._in_flight


async def test_a_prompt_is_prefilled_once_and_never_read_across_a_weight_update(stack: Stack) -> None:
    client = client_of(stack)
    prompt = [20 + (11 * i) % 200 for i in range(200)]

    async def hits(name: str) -> float:
        await client.generate(GenerateRequest(name, prompt, 2, 1.0, seed=1))
        return (await metrics_of(client))["vllm:prefix_cache_hits_total"]

    first, second = await hits("prefix-1"), await hits("prefix-2")
    assert second > first
    await stack.parts.weights.sync()
    assert await hits("prefix-3") == second
    assert await hits("prefix-4") > second


async def test_a_request_that_waits_for_the_end_of_a_pause_can_be_aborted(stack: Stack) -> None:
    client = client_of(stack)
    await client.pause()
    waiting = asyncio.create_task(client.generate(request("waits")))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await client.abort(["waits"])
    assert (await waiting).finish_reason == "abort"
    await client.resume()
    assert (await client.generate(request("goes"))).finish_reason in ("stop", "length")


async def test_the_server_explains_what_it_refuses(stack: Stack) -> None:
    client = client_of(stack)
    with pytest.raises(EngineRequestError, match="maximum model length"):
        await client.generate(GenerateRequest("too-long", PROMPT * 50, 4, 1.0))
    with pytest.raises(EngineRequestError, match="out of vocabulary"):
        await client.generate(GenerateRequest("no-token", [5, 10_000_000], 4, 1.0))
