"""What a weight update does to requests that run through it (`inflight_kv`), on a real vLLM against transformers."""

import asyncio
import copy
import itertools
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.fakes.client import metrics_of
from tests.integration.weights.vllm_server import Server, disturb, model_logprobs
from transformers import Qwen2ForCausalLM

from telescope.inference.base import GenerateRequest, Generation
from telescope.inference.vllm.output_batching import BATCH_TOKENS

pytestmark = pytest.mark.e2e

PROMPT = [(11 * i + 5) % 290 for i in range(40)]
NUM_RUNNING = 64
"""The server runs eight at once and has the others queued, so it stays busy while its pause is on the way."""
MAX_TOKENS = 200
TOKENS_BEFORE = 160
"""Sampled by all requests together before the weights change."""
SAME = 1e-4
"""Nats by which engine and transformers may differ in float32."""


@pytest.fixture(scope="module")
def server(tied_server: Server) -> Server:
    return tied_server


def through_an_update(server: Server, *, drop_caches: bool) -> tuple[Qwen2ForCausalLM, list[Generation]]:
    """Answers during which the weights changed, and the model that they began with.

    Those that ended before the update are left out.
    """
    before = copy.deepcopy(server.model)
    name = f"inflight-{server.version}"
    disturb(server.model, seed=server.version + 100)
    update = server.next_update()

    async def sampled() -> float:
        return (await metrics_of(server.client))["vllm:generation_tokens_total"]

    seeds = itertools.count()
    updated = asyncio.Event()

    async def generate_until_updated() -> list[Generation]:
        answers = []
        while not updated.is_set():
            seed = next(seeds)
            # Of several lengths, so that never all running answers end with one step of the engine.
            max_tokens = MAX_TOKENS - 11 * (seed % 8)
            request = GenerateRequest(f"{name}-{seed}", PROMPT, max_tokens, 1.0, seed=seed, ignore_eos=True)
            answers.append(await server.client.generate(request))
        return answers

    async def go() -> list[Generation]:
        already = await sampled()
        running = [asyncio.create_task(generate_until_updated()) for _ in range(NUM_RUNNING)]
        async with asyncio.timeout(60):
            while await sampled() - already < TOKENS_BEFORE:  # noqa: ASYNC110  # an engine sends no notification
                await asyncio.sleep(0.01)
        await server.in_place(update, drop_caches=drop_caches)
        updated.set()
        return [answer for answers in await asyncio.gather(*running) for answer in answers]

    answers = server.run(go())
    assert {answer.finish_reason for answer in answers} == {"length"}, "the run goes on"
    through = [answer for answer in answers if len(answer.version_spans) == 2]
    assert through, f"no answer ran through the update: {[answer.version_spans for answer in answers]}"
    for answer in through:
        assert [version for version, _, _ in answer.version_spans] == [server.version - 1, server.version]
    return before, through


def worst_difference(model: Qwen2ForCausalLM, answer: Generation, start: int, end: int) -> float:
    """Largest difference between the engine and `model`, which reads the whole context, over sampled tokens."""
    whole = model_logprobs(model, PROMPT + answer.token_ids_N.tolist())[len(PROMPT) - 1 :]
    pairs = zip(whole[start:end], answer.logprobs_N[start:end].tolist(), strict=True)
    return max(abs(expected - reported) for expected, reported in pairs)


def test_with_recompute_every_later_token_is_sampled_by_the_new_weights_alone(server: Server) -> None:
    preempted = server.run(metrics_of(server.client))["vllm:num_preemptions_total"]
    before, answers = through_an_update(server, drop_caches=True)
    for answer in answers:
        (_, start, middle), (_, _, end) = answer.version_spans
        assert worst_difference(before, answer, start, middle) < SAME
        assert worst_difference(server.model, answer, middle, end) < SAME
        assert worst_difference(before, answer, middle, end) > 0.1, "the update changed the model"
    after = server.run(metrics_of(server.client))["vllm:num_preemptions_total"]
    assert after - preempted >= len(answers), "the caches of running requests were dropped"


def test_with_keep_later_tokens_are_sampled_over_what_the_old_weights_made_of_the_context(server: Server) -> None:
    preempted = server.run(metrics_of(server.client))["vllm:num_preemptions_total"]
    before, answers = through_an_update(server, drop_caches=False)
    for answer in answers:
        (_, start, middle), (_, _, end) = answer.version_spans
        assert worst_difference(before, answer, start, middle) < SAME
        assert worst_difference(server.model, answer, middle, end) > 0.01, "neither model made all of these logprobs"
        assert worst_difference(before, answer, middle, end) > 0.1
    assert server.run(metrics_of(server.client))["vllm:num_preemptions_total"] == preempted
    fresh = server.run(server.client.generate(GenerateRequest("fresh", PROMPT, 20, 1.0, seed=1)))
    assert worst_difference(server.model, fresh, 0, len(fresh.token_ids_N)) < SAME, "a later request reads no old cache"


def test_tokens_of_whole_answers_are_batched_and_streamed_tokens_are_not(server: Server) -> None:
    """vLLM measures the time between two messages with tokens of a request, and to the first token by the first."""
    num_tokens = 3 * BATCH_TOKENS + 1
    after_first, between = "vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count"

    async def messages_of(request: Coroutine[Any, Any, object]) -> list[float]:
        before = await metrics_of(server.client)
        await request
        after = await metrics_of(server.client)
        return [after[name] - before.get(name, 0.0) for name in (after_first, between)]

    whole = GenerateRequest("whole", PROMPT, num_tokens, 1.0, seed=1, ignore_eos=True)
    models = json.loads(server.run(server.client._control("GET", "/v1/models")))
    text = {"model": models["data"][0]["id"], "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True}
    assert server.run(messages_of(server.client.generate(whole))) == [1, 3]
    assert server.run(messages_of(server.client._control("POST", "/v1/completions", text))) == [1, num_tokens - 1]
