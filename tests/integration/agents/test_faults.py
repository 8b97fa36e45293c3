"""Whatever an agent does wrong, what is trained is what it was answered, and the worker goes on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.integration.agents.conftest import Agent
from tests.integration.agents.test_agents import ended, sampled_once

from telescope.environments.base import RewardResult, Sample
from telescope.environments.context import RolloutContext
from telescope.rollout.endpoint import MAX_IN_FLIGHT

CALLS = """
import json, os, urllib.request
def call():
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        b'{"messages": [{"role": "user", "content": "Hi"}]}',
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))
"""
"""The start of an agent's program."""
SLOW = "Take your time."


async def program(context: RolloutContext, code: str) -> str:
    result = await context.run([sys.executable, "-c", CALLS + code])
    return f"exit code {result.exit_code}"


async def ask(context: RolloutContext, text: str = "Hi", **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return await context.openai().chat.completions.create(messages=messages, **{"model": "policy", **fields})


async def refused(call: Awaitable[Any]) -> str:
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    return f"{caught.value.status_code}"


async def is_killed(context: RolloutContext) -> str:
    return await program(context, "call(); os.kill(os.getpid(), 9)")


async def hangs(context: RolloutContext) -> str:
    return await program(context, "call(); open(os.environ['PID_FILE'], 'w').write(str(os.getpid())); input = None\n"
                                  "import time; time.sleep(600)")  # fmt: skip


async def never_calls(context: RolloutContext) -> str:
    return await program(context, "")


async def calls_twice_at_once(context: RolloutContext) -> str:
    both = await asyncio.gather(ask(context), ask(context))
    return f"{len({each.id for each in both})} answers"


async def floods(context: RolloutContext) -> str:
    answers = await asyncio.gather(*(ask(context) for _ in range(3 * MAX_IN_FLIGHT)), return_exceptions=True)
    refusals = [each for each in answers if isinstance(each, openai.RateLimitError)]
    return f"{len(answers) - len(refusals)} answers" if refusals else "no refusal"


async def disconnects_in_mid_stream(context: RolloutContext) -> str:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), await ask(context, SLOW, stream=True) as stream:
            await anext(aiter(stream))
    return f"{len((await ask(context)).choices)} answers"


async def sends_10_mb(context: RolloutContext) -> str:
    status = await refused(ask(context, "word " * 2_000_000))
    await ask(context)
    return status


async def uses_another_key(context: RolloutContext) -> str:
    other = context._services._endpoint  # type: ignore[attr-defined]
    ended_key = other.open(None, None)
    other.close_rollout(ended_key)
    client = openai.AsyncOpenAI(base_url=context.base_url, api_key=ended_key, max_retries=0)
    status = await refused(client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}]))
    await ask(context)
    return status


async def asks_for_another_model(context: RolloutContext) -> str:
    status = await refused(ask(context, model="gpt-6"))
    await ask(context)
    return status


async def asks_for_four_answers(context: RolloutContext) -> str:
    status = await refused(ask(context, n=4))
    await ask(context)
    return status


class Faulty(Agent):
    rollout_timeout_seconds = 20.0

    def __init__(self, act: Callable[[RolloutContext], Awaitable[str]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.act = act

    async def rollout(self, sample: Sample, context: RolloutContext) -> RewardResult:  # type: ignore[override]
        return RewardResult(1.0, sample_tags={"saw": await self.act(context)})


@pytest.mark.parametrize(
    ("act", "saw"),
    [
        (is_killed, "exit code -9"), (calls_twice_at_once, "2 answers"), (floods, f"{MAX_IN_FLIGHT} answers"),
        (disconnects_in_mid_stream, "1 answers"), (sends_10_mb, "400"), (uses_another_key, "401"),
        (asks_for_another_model, "404"), (asks_for_four_answers, "400"),
    ],
)  # fmt: skip
async def test_a_fault_of_an_agent_trains_only_what_it_was_answered(bench: Any, act: Any, saw: str) -> None:
    made = await bench(Faulty, lambda prompt: "Hello.", act=act)
    policy = made.policy
    seconds = {floods: 3.0}.get(act, 0.0)
    policy.before = lambda: asyncio.sleep(60 if SLOW in policy.prompts[-1] else seconds)
    sample = await made.run()
    num_answers = int(saw.split()[0]) if saw.endswith("answers") else 1
    assert sample.reward.sample_tags["saw"] == saw
    assert sum(turn.trained for turn in sample.turns) == len(sample.turns) == num_answers
    policy.requests = [r for r, prompt in zip(policy.requests, policy.prompts, strict=True) if SLOW not in prompt]
    sampled_once(sample, policy)
    assert made.slots.num_leased == 0


@pytest.mark.parametrize(("act", "message"), [(never_calls, "without an answer"), (hangs, "rollout_timeout_seconds")])
async def test_an_agent_that_does_nothing_masks_its_sample(
    bench: Any, act: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    monkeypatch.setattr(Faulty, "rollout_timeout_seconds", 5.0)
    sample = await (await bench(Faulty, lambda prompt: "Hello.", act=act)).run()
    assert (sample.reward, sample.failure_kind) == (None, "environment")
    assert message in sample.failure_message
    if act is hangs:
        assert await asyncio.to_thread(ended, Path("/proc", (tmp_path / "pid").read_text())), "its process lives on"


async def test_a_call_after_the_end_is_refused(bench: Any) -> None:
    late: list[asyncio.Task[str]] = []
    over = asyncio.Event()

    async def call_late(context: RolloutContext) -> str:
        async def wait() -> str:
            await over.wait()
            return await refused(ask(context))

        late.append(asyncio.ensure_future(wait()))
        await ask(context)
        return ""

    made = await bench(Faulty, lambda prompt: "Hello.", act=call_late)
    sample = await made.run()
    over.set()
    assert (await late[0], len(made.policy.requests), len(sample.turns)) == ("401", 1, 1)
