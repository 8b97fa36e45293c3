"""Requests that fail at the endpoint of a rollout worker: malformed, failed, repeated, given up, too many."""

import asyncio
import json
from contextlib import aclosing

import openai
import pytest
from tests.unit.rollout.endpoint_policy import ANSWER, USER, Policy, ask_chat, ask_messages, ask_responses, until

from telescope.environments.context import Answer, RefusedCall
from telescope.errors import InfrastructureError
from telescope.rollout import endpoint as module
from telescope.rollout.endpoint import MAX_BODY_BYTES, MAX_IN_FLIGHT


async def test_bodies_that_cannot_be_read_are_refused(policy):
    for body in (b"{", b"[]", b"\xff", b"[" * 100_000, b""):
        status, error, _ = await policy.post(body=body)
        assert status == 400
        assert "JSON" in error["error"]["message"]
    status, error, _ = await policy.post(body=b" " * (MAX_BODY_BYTES + 1))
    assert status == 413
    assert "32 MB" in error["error"]["message"]
    ten_mb = {"role": "user", "content": "x" * 10 * 2**20}
    assert (await policy.post(body={"messages": [ten_mb]}))[0] == 200


@pytest.mark.parametrize(("raised", "status", "code"), [
    (RefusedCall("This model's maximum context length is 8 tokens."), 400, "context_length_exceeded"),
    (InfrastructureError("engine 10.0.0.3 is gone"), 503, "unavailable"),
    (RuntimeError("secret"), 500, "internal_error"),
])  # fmt: skip
async def test_failures_of_the_policy_reach_both_sdks(policy, raised, status, code, monkeypatch):
    from anthropic import APIStatusError

    policy.answer = raised
    with pytest.raises(openai.APIStatusError) as caught:
        await policy.openai(max_retries=0).chat.completions.create(model="policy", messages=[USER])
    assert (caught.value.status_code, caught.value.code) == (status, code)
    with pytest.raises(APIStatusError) as caught_too:
        await policy.anthropic(max_retries=0).messages.create(model="policy", max_tokens=9, messages=[USER])
    assert caught_too.value.status_code == status
    for text in (caught.value.message, caught_too.value.message):
        assert ("maximum context length" in text and "prompt is too long" in text) == (status == 400)
        assert "10.0.0.3" not in text
        assert "secret" not in text
    assert ("retry-after" in caught.value.response.headers) == (status == 503)
    # After its first byte a stream can only end with an event.
    monkeypatch.setattr(module, "PING_SECONDS", 0.01)
    policy.wait = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, policy.wait.set)
    text = (await policy.post(body={"messages": [USER], "stream": True}))[1]
    assert text.startswith(": waiting\n\n")
    assert f'"code":"{code}"' in text.splitlines()[-2]
    assert policy.refused == [code] * 3


async def test_a_slow_stream_is_kept_alive(policy, monkeypatch):
    monkeypatch.setattr(module, "PING_SECONDS", 0.01)
    for ask in (ask_chat, ask_responses, ask_messages):
        policy.wait = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, policy.wait.set)
        assert "Let me look." in json.dumps(await ask(policy, True))


async def test_another_model_key_or_url_is_not_found(policy):
    import anthropic

    other = Policy(policy.server)
    with pytest.raises(openai.NotFoundError, match="`gpt-9` does not exist"):
        await policy.openai().chat.completions.create(model="gpt-9", messages=[USER])
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        await policy.openai(api_key="sk-guessed").models.list()
    with pytest.raises(anthropic.NotFoundError, match="/v1/messages/batches"):
        await policy.anthropic().messages.batches.list()
    policy.server.close_rollout(policy.key)
    with pytest.raises(anthropic.AuthenticationError, match="a rollout that is running"):
        await policy.anthropic().messages.create(model="policy", max_tokens=9, messages=[USER])
    await ask_chat(other, False)
    assert (len(policy.calls), len(other.calls)) == (0, 1)
    assert (policy.refused, other.refused) == (["model_not_found", "404"], []), "none without a key, or after the end"


async def test_a_retry_gets_the_recorded_answer(policy):
    retry = {"x-stainless-retry-count": "1"}
    first = (await policy.post())[1]
    assert (await policy.post(**retry))[1]["id"] == first["id"]
    assert len(policy.calls) == 1
    await policy.post()  # the same body without the header: a second answer
    await policy.post(body={"messages": [USER, USER]}, **retry)
    assert len(policy.calls) == 3
    for route in ("chat/completions", "responses"):
        await policy.post(route, {"messages": [USER], "input": "Hi"}, **{"Idempotency-Key": "mine"})
    assert len(policy.calls) == 4


async def test_a_retry_waits_for_the_answer_that_is_being_sampled(policy):
    policy.wait = asyncio.Event()
    client = policy.openai(max_retries=2, timeout=0.3)
    pending = asyncio.create_task(client.chat.completions.create(model="policy", messages=[USER]))
    await asyncio.sleep(0.5)
    policy.wait.set()
    assert (await pending).choices[0].message.content == "Let me look."
    assert (len(policy.calls), policy.cancelled, policy.dropped) == (1, [], [])


async def test_an_answer_waits_for_a_retry_from_its_last_client_on(policy, monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.8)
    policy.wait = asyncio.Event()
    for attempt in range(2):  # the second one disconnects shortly before the wait for it would have ended
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1 + 0.5 * attempt):
                await policy.post(**{"x-stainless-retry-count": str(attempt)})
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.4)
    assert (len(policy.calls), policy.cancelled) == (1, [])
    await until(lambda: policy.cancelled)


async def test_a_retry_after_a_failure_samples_again(policy):
    policy.answer = InfrastructureError("gone")
    client = policy.openai(max_retries=1)
    pending = asyncio.create_task(client.chat.completions.create(model="policy", messages=[USER]))
    await until(lambda: policy.calls)
    policy.answer = ANSWER
    await pending
    assert len(policy.calls) == 2


async def test_an_answer_that_nobody_waits_for_is_cancelled(policy, monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    policy.wait = asyncio.Event()
    for stream in (False, True):
        client = policy.openai(max_retries=0, timeout=0.1)
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="policy", messages=[USER], stream=stream)
    await until(lambda: len(policy.cancelled) == 2)
    policy.wait = None
    await ask_chat(policy, True)  # the server goes on


async def test_an_answer_that_was_not_read_before_the_end_is_dropped(policy):
    policy.wait = asyncio.Event()
    with pytest.raises(openai.APITimeoutError):
        await policy.openai(max_retries=0, timeout=0.1).chat.completions.create(model="policy", messages=[USER])
    policy.wait.set()
    await asyncio.sleep(0.05)
    policy.server.close_rollout(policy.key)
    assert policy.dropped == [ANSWER]


async def test_a_client_that_leaves_in_mid_stream_drops_the_answer(policy, monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    policy.answer = long = Answer("long " * 2_000_000, id="a1")
    async with aclosing(
        await policy.openai().chat.completions.create(model="policy", messages=[USER], stream=True)
    ) as s:
        await anext(aiter(s))
    await until(lambda: policy.dropped == [long])
    policy.answer = ANSWER
    await ask_chat(policy, True)


async def test_ending_a_rollout_ends_its_requests(policy):
    policy.wait = asyncio.Event()
    pending = asyncio.create_task(policy.openai().chat.completions.create(model="policy", messages=[USER]))
    await until(lambda: policy.calls)
    policy.server.close_rollout(policy.key)
    with pytest.raises(openai.APIStatusError, match="The rollout was ended") as caught:
        await pending
    assert caught.value.status_code == 499
    assert policy.refused == []
    assert policy.cancelled == policy.calls


async def test_a_flood_is_answered_with_429(policy):
    policy.wait = asyncio.Event()
    client = policy.openai(max_retries=4)
    create = client.chat.completions.create
    pending = [
        asyncio.create_task(create(model="policy", messages=[USER], extra_headers={})) for _ in range(MAX_IN_FLIGHT)
    ]
    await until(lambda: len(policy.calls) == MAX_IN_FLIGHT)
    status, error, response = await policy.post()
    assert (status, error["error"]["code"]) == (429, "rate_limit_exceeded")
    assert response.headers["Retry-After"] == "1"
    assert len(policy.calls) == MAX_IN_FLIGHT
    policy.wait.set()
    await asyncio.gather(*pending)
    # The retry of a refused request is a call of its own, not a repetition of an equal one.
    await policy.post(**{"x-stainless-retry-count": "1"})
    assert len(policy.calls) == MAX_IN_FLIGHT + 1
