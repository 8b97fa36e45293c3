"""Rollouts on a real vLLM: several turns, stale samples, and aborts."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from typing import Any

import pytest
from tests.e2e.stack.conftest import Outcome, Stack
from tests.e2e.stack.test_inference import client_of, request
from tests.fakes.client import metrics_of
from transformers import AutoTokenizer

from telescope.inference.base import GenerateRequest, Generation

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

KV_BLOCK_TOKENS = 128
"""Tokens of one block of vLLM's KV cache on the CPU; whole blocks are shared."""

PROMPTED = "<|im_start|>assistant\n"


def turns_of(run: Outcome) -> dict[str, list[dict[str, Any]]]:
    """The rows of `turns` of every sample, in order."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(run.record.table("turns").to_pylist(), key=lambda row: row["turn"]):
        rows[row["sample_id"]].append(row)
    return rows


@pytest.mark.slow
async def test_reward_rises_over_several_turns(stack: Stack) -> None:
    run = await stack.run(environment="puzzle_series", number_of_steps=24)
    rewards = [row["reward_mean"] for row in run.steps()]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.04, rewards


async def test_the_tokens_of_several_turns_are_those_of_the_template(stack: Stack) -> None:
    run = await stack.run(environment="puzzle_series", number_of_steps=3, record_tokens="all")
    tokenizer = AutoTokenizer.from_pretrained(stack.parts.config.model)
    turns = turns_of(run)
    tokens = {row["sample_id"]: row for row in run.record.table("tokens").to_pylist()}
    kept = [sample for sample in run.samples(status="kept") if sample["num_turns"] == 2]
    assert kept
    for sample in kept:
        first, reply, second_answer = turns[sample["sample_id"]]
        assert [row["role"] for row in (first, reply, second_answer)] == ["assistant", "user", "assistant"]
        ids, versions = tokens[sample["sample_id"]]["token_ids"], tokens[sample["sample_id"]]["versions"]
        prompt = tokenizer(sample["prompt_text"], add_special_tokens=False)["input_ids"]
        assert ids[: len(prompt)] == prompt
        written = tokenizer.decode(ids[: len(prompt) + first["num_tokens"] + reply["num_tokens"]])
        closed = first["text"] + "<|im_end|>\n"  # sampled, or added where the answer was cut off
        assert written == f"{sample['prompt_text']}{closed}<|im_start|>user\n{reply['text']}<|im_end|>\n" + PROMPTED
        assert sample["divergences"] == []
        assert sum(version >= 0 for version in versions) == first["num_tokens"] + second_answer["num_tokens"]
    (described,) = run.record.table("environments").to_pylist()
    assert (described["name"], described["is_multi_turn"]) == ("puzzle_series", True)


async def test_every_turn_is_a_sample_of_its_own_without_interleaving(stack: Stack) -> None:
    run = await stack.run(
        environment="puzzle_series", number_of_steps=2, interleaved_rollouts=False, max_async_rollout=0
    )
    replies = [row for rows in turns_of(run).values() for row in rows if row["role"] == "user"]
    assert replies
    assert all(row["restarts"] for row in replies)
    steps = run.steps()
    # On-policy, so trainer and engine agree on every token, if each part is trained in the context it was sampled in.
    assert all(0 <= step["metrics"]["kl_divergence_inference"] < 1e-6 for step in steps)
    assert steps[0]["num_samples"] == 16 * 8


async def test_stale_samples_are_aborted_and_requeued(stack: Stack) -> None:
    run = await stack.run(number_of_steps=8, max_async_rollout=2, max_off_policy_steps=1)
    assert all(sample["age"] <= 1 for sample in run.samples(status="kept"))
    assert run.orchestrator.ledger.num_requeued > 0
    assert run.orchestrator.ledger.is_balanced()
    client = client_of(stack)
    assert not client._in_flight


# A cancelled sample must not continue to generate in the engine.
async def test_the_engine_s_running_requests_fall_to_none_at_once_when_they_are_aborted(stack: Stack) -> None:
    client = client_of(stack)
    aborted: list[Generation] = []
    async with asyncio.timeout(60):
        # On a busy machine the answers may all end before the engine's metrics are read, or before the abort arrives.
        for attempt in itertools.count():
            names = [f"fall-{attempt}-{i}" for i in range(64)]
            # At temperature 2 the tiny model hardly ever ends an answer by itself.
            requests = [request(name, seed, temperature=2.0, max_tokens=200) for seed, name in enumerate(names)]
            answers = asyncio.gather(*(client.generate(one) for one in requests))
            while await running(stack) < 4 and not answers.done():  # noqa: ASYNC110  # an engine sends no notification
                await asyncio.sleep(0.01)
            await client.abort(names)
            # With tokens: the client itself ends a request without any if the engine does not.
            aborted = [one for one in await answers if one.finish_reason == "abort" and len(one.token_ids_N)]
            if len(aborted) >= 4:
                break
    assert max(len(generation.token_ids_N) for generation in aborted) < 200
    # One more request has the engine report its state again; nothing runs but that.
    await client.generate(request("after-the-fall", max_tokens=2))
    assert await running(stack) <= 1


async def running(stack: Stack) -> float:
    return (await metrics_of(client_of(stack)))["vllm:num_requests_running"]


# Defect 23: prefix cache off, or stale after a sync.
async def test_the_prompt_of_a_group_is_prefilled_once(stack: Stack) -> None:
    client = client_of(stack)
    prompt = [30 + (13 * i) % 200 for i in range(200)]
    before = await metrics_of(client)
    group = [GenerateRequest(f"group-{i}", prompt, 4, 1.0, seed=i) for i in range(8)]
    await asyncio.gather(*(client.generate(member) for member in group))
    after = await metrics_of(client)
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    queried, hit = (after[name] - before[name] for name in names)
    assert queried == 8 * len(prompt)
    assert hit >= 7 * (len(prompt) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS)
