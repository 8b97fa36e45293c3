"""Whatever an agent does wrong, what is trained is what it was answered, and the worker goes on."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
from tests.integration.agents.conftest import Agent
from tests.integration.agents.test_agents import sampled_once
from tests.processes import has_ended

from telescope.environments.base import RewardResult, Sample
from telescope.environments.context import Answer, RolloutContext
from telescope.environments.registry import complete_class
from telescope.errors import UserError
from telescope.rollout.endpoint import MAX_IN_FLIGHT
from telescope.rollout.request_slots import RequestSlotPool
from telescope.sandbox import SandboxCommandTimeoutError

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
    body: Any = {"model": "policy", "messages": [{"role": "user", "content": text}], **fields}
    return await context.openai().chat.completions.create(**body)


async def refused(call: Awaitable[Any]) -> str:
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    return f"{caught.value.status_code}"


async def is_killed(context: RolloutContext) -> str:
    return await program(context, "call(); os.kill(os.getpid(), 9)")


async def hangs(context: RolloutContext) -> str:
    return await program(context, "call(); open(os.environ['PID_FILE'], 'w').write(str(os.getpid())); input = None\n"
                                  "import time; time.sleep(600)")  # fmt: skip


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


async def uses_another_key(context: RolloutContext) -> str:
    other = context._services._endpoint  # type: ignore[attr-defined]
    ended_key = other.open(None, None)
    other.close_rollout(ended_key)
    client = openai.AsyncOpenAI(base_url=context.base_url, api_key=ended_key, max_retries=0)
    status = await refused(client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}]))
    await ask(context)
    return status


def is_refused(**fields: Any) -> Any:
    async def act(context: RolloutContext) -> str:
        status = await refused(ask(context, **fields))
        await ask(context)
        return status

    return act


async def exits_in_a_background_task(context: RolloutContext) -> str:
    async def leave() -> None:
        sys.exit(3)

    task = asyncio.create_task(leave())
    await ask(context)
    return str(task.exception())


class Faulty(Agent):
    rollout_timeout_seconds = 20.0

    def __init__(self, act: Callable[[RolloutContext], Awaitable[str]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.act = act

    async def rollout(self, sample: Sample, context: RolloutContext) -> RewardResult:
        return RewardResult(1.0, sample_tags={"saw": await self.act(context)})


@pytest.mark.parametrize(
    ("act", "saw"),
    [
        (is_killed, "exit code -9"), (calls_twice_at_once, "2 answers"), (floods, f"{MAX_IN_FLIGHT} answers"),
        (disconnects_in_mid_stream, "1 answers"), (uses_another_key, "401"), (is_refused(model="gpt-6"), "404"),
        (is_refused(n=4), "400"), (is_refused(text="word " * 2_000_000), "400"),
        (exits_in_a_background_task, "user code raised SystemExit: 3"),
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


async def test_a_refusal_that_the_agent_catches_is_counted_by_its_code(bench: Any) -> None:
    for act, code in ((is_refused(model="gpt-6"), "model_not_found"), (is_refused(messages="Hi"), "400")):
        sample = await (await bench(Faulty, lambda prompt: "Hello.", act=act)).run()
        assert sample.reward.sample_metrics == {f"agent/refused_{code}": 1, "agent/calls": 1}


async def lacks_a_package(context: RolloutContext) -> str:
    return str(await context.run([sys.executable, "-c", "import no_such_sdk"]))


async def lacks_a_package_in_its_sandbox(context: RolloutContext) -> str:
    return str(await (await context.sandbox()).run("python3 -c 'import no_such_sdk'", env=context.env()))


@pytest.mark.parametrize(
    "act", [lacks_a_package, pytest.param(lacks_a_package_in_its_sandbox, marks=pytest.mark.sandbox)]
)
async def test_a_program_that_made_no_call_is_a_failure_with_its_error(bench: Any, act: Any) -> None:
    sample = await (await bench(Faulty, [], act=act)).run()
    assert sample.failure_kind == "environment"
    assert "made no call that was answered" in sample.failure_message
    assert "ended with exit code 1" in sample.failure_message
    assert "No module named 'no_such_sdk'" in sample.failure_message


async def test_an_agent_that_hangs_masks_its_sample(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    monkeypatch.setattr(Faulty, "rollout_timeout_seconds", 5.0)
    sample = await (await bench(Faulty, lambda prompt: "Hello.", act=hangs)).run()
    assert (sample.reward, sample.failure_kind) == (None, "environment")
    limit = "it did not end within 5 seconds (rollout_timeout_seconds)"
    assert sample.failure_message == f"environment 'agent', item 0: rollout failed: {limit}"
    assert "Traceback" not in capfd.readouterr().err, "the message explains it"
    assert await asyncio.to_thread(has_ended, int((tmp_path / "pid").read_text())), "its process lives on"


async def test_a_program_of_a_background_task_ends_with_its_rollout(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(pid))
    kept: list[RolloutContext] = []

    async def starts_a_server(context: RolloutContext) -> str:
        kept.append(context)
        task = asyncio.create_task(hangs(context))
        while not pid.exists() or not pid.read_text():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)
        return str(task.done())

    sample = await (await bench(Faulty, lambda prompt: "Hello.", act=starts_a_server)).run()
    assert sample.reward.sample_tags["saw"] == "False"
    assert await asyncio.to_thread(has_ended, int(pid.read_text())), "its process lives on"
    for late in (kept[0].run(["true"]), kept[0].sandbox()):
        with pytest.raises(UserError, match="the rollout has ended"):
            await late


@pytest.mark.sandbox
async def test_a_late_command_of_a_sandbox_is_named_without_the_keys_of_its_variables(bench: Any) -> None:
    async def act(context: RolloutContext) -> str:
        return str(await (await context.sandbox()).run("sleep 60", env=context.env(), timeout=1))

    sample = await (await bench(Faulty, [], act=act)).run()
    assert "the command 'sleep 60' did not end within 1 s" in sample.failure_message


async def test_a_command_of_the_agent_that_is_late_masks_its_sample_without_a_retry(bench: Any) -> None:
    async def is_late(context: RolloutContext) -> str:
        await context.generate(HI)
        raise SandboxCommandTimeoutError("python3 agent.py", 5)

    sample = await (await bench(Faulty, lambda prompt: "Hello.", act=is_late)).run()
    assert (sample.failure_kind, sample.num_infrastructure_retries) == ("environment", 0)
    assert "'python3 agent.py' did not end within 5 s" in sample.failure_message
    assert "raise its `timeout`, or catch" in sample.failure_message


async def test_a_sandbox_that_a_failed_rollout_waits_for_is_not_taken(bench: Any) -> None:
    async def raises_beside_a_sandbox(context: RolloutContext) -> str:
        async def fails() -> None:
            raise ValueError("no")

        await context.generate(HI)
        await asyncio.gather(context.sandbox(), fails())
        return ""

    made = await bench(Faulty, lambda prompt: "Hello.", act=raises_beside_a_sandbox)
    assert "ValueError: no" in (await made.run()).failure_message
    (pool,) = await asyncio.gather(*vars(made.environment)["_pools"].values())
    await asyncio.sleep(0.1)
    assert not pool.in_use_sandboxes


class Odd(BaseException):
    """An error that `except Exception` does not catch."""


HI: Any = [{"role": "user", "content": "Hi"}]


def raises(error: BaseException) -> Any:
    async def act(context: RolloutContext) -> str:
        await context.generate(HI)
        raise error

    return act


def generates(prompt: Any = HI, **options: Any) -> Any:
    async def act(context: RolloutContext) -> str:
        return (await context.generate(prompt, **options)).text

    return act


def names(*chats: Any, reward: Any = None) -> Any:
    async def act(context: RolloutContext) -> str:
        for name in chats:
            await context.chat(name, reward).generate(HI)
        return ""

    return act


def compacts(messages: Any, **options: Any) -> Any:
    async def act(context: RolloutContext) -> str:
        await context.generate(HI)
        return str(await context.compact(messages, **options))

    return act


async def takes_turns(context: RolloutContext) -> str:
    return str(await context.take_turns())


def runs(command: Any) -> Any:
    async def act(context: RolloutContext) -> str:
        return (await context.run(command)).stdout

    return act


async def asks_no_judge(context: RolloutContext) -> str:
    return str(await context.judge("Is it right?"))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        *((raises(error), f"user code raised {type(error).__name__}") for error in (
            Odd("x"), asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit())),
        (raises(BaseExceptionGroup("some", [Odd("x")])), "user code raised Odd: x"),
        (raises(RecursionError()), "RecursionError (test_faults.py:"),
        (generates([]), "malformed: it has no messages"),
        *((generates(prompt), "give a list of messages such as") for prompt in ("Hi", ["Hi"], {"role": "user"}, None)),
        (generates([*HI, Answer("Hello.")]), "got a list with Answer(text='Hello.'"),
        (generates([*HI, Answer("Hello.")]), "append its `message`"),
        (generates([{"content": "Hi"}]), "has the role None"), (generates([{"role": "robot"}]), "has the role 'robot'"),
        (generates([{"role": "user", "content": b"Hi"}]), "the content of a message is b'Hi'"),
        (generates([{"role": "user", "content": 5}]), "malformed"),
        (generates([{"role": "user", "content": "\ud800"}]), "malformed"),
        (generates([{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}]), "KeyError: 'function'"),
        (generates(HI * 1000), "maximum context length"),
        *((generates(HI, tools=tools), "write {'type': 'function'") for tools in (
            "add", ["add"], [print], [{"name": "add"}], [{"function": {}}], {"type": "function"})),
        *((generates(HI, tools=[{"function": {"name": "add", "parameters": parameters}}]), "malformed: the tool 'add'")
          for parameters in ("a", ["a"], {"properties": ["a"]})),
        (generates([-1, 2]), "no token -1"), (generates([1, "a"]), "no token 'a'"),
        *((generates(HI, sampling={"max_tokens": value}), f"positive integer, but got {value!r}")
          for value in (0, -1, "5", 2.5)),
        (generates(HI, sampling={"stop": [""]}), "Invalid 'stop'"),
        (generates(HI, sampling={"stop": [5]}), "Invalid 'stop'"),
        (generates(HI, sampling=["max_tokens"]), "malformed"),
        (generates(HI, sampling={"max_token": 5}), "sampling has 'max_token': it takes max_tokens and stop"),
        *((names("x", reward=value), f"the reward of the chat 'x' is {shown}") for value, shown in (
            (float("nan"), "nan"), (float("inf"), "inf"), (1e300, "1e+300"), ("good", "str 'good'"))),
        (names("a", "a"), "named 'a' already"), (names(""), "needs a name"), (names(["a"]), "needs a name"),
        (compacts(HI, keep=-1), "keep=-1"), (compacts(HI, by="x"), "by='x'"),
        (asks_no_judge, "has no judge: add"), (takes_turns, "Faulty has no `compute_reward`"),
        (runs("echo hi"), "run got the text 'echo hi': give a list"),
    ],
)  # fmt: skip
async def test_an_odd_error_or_call_masks_its_sample_with_a_reason(bench: Any, act: Any, message: str) -> None:
    made = await bench(Faulty, lambda prompt: "Hello.", act=act)
    sample = await asyncio.wait_for(made.run(), 10)
    assert (sample.reward, sample.failure_kind, made.slots.num_leased) == (None, "environment", 0)
    assert message in sample.failure_message
    assert not sample.num_infrastructure_retries, "an engine is blamed"


@pytest.mark.parametrize("result", ["a text", None, RewardResult(1.0, sample_metrics=None)])  # type: ignore[arg-type]
async def test_a_result_of_the_wrong_type_is_shown(bench: Any, result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def rollout(self: Any, sample: Sample, context: RolloutContext) -> Any:
        await context.generate(HI)
        return result

    monkeypatch.setattr(Faulty, "rollout", rollout)
    sample = await (await bench(Faulty, lambda prompt: "Hello.", act=None)).run()
    assert "MalformedResultError" in sample.failure_message


@pytest.mark.parametrize(
    ("act", "num_turns"),
    [(names("a/../b", "ü 漢"), 2), (names("a", reward=None), 1), (generates(HI, sampling={"stop": "lo."}), 1),
     (compacts([]), 1)],
)  # fmt: skip
async def test_an_odd_call_that_has_a_meaning_is_answered(bench: Any, act: Any, num_turns: int) -> None:
    made = await bench(Faulty, lambda prompt: "Hello.", act=act)
    sample = await made.run()
    assert (sample.reward.total_reward, len(sample.turns), sample.chat_rewards) == (1.0, num_turns, {})
    assert all(request.stop in ((), ["lo."]) for request in made.policy.requests)
    sampled_once(sample, made.policy)


async def test_calls_that_nobody_waits_for_end_with_the_rollout(bench: Any) -> None:
    left: list[asyncio.Task[Any]] = []

    async def leaves_a_call(context: RolloutContext) -> str:
        async def call_twice() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await context.generate([{"role": "user", "content": SLOW}])
            await context.generate(HI)

        await context.generate(HI)
        left.append(asyncio.ensure_future(call_twice()))
        await asyncio.sleep(0.1)
        return ""

    made = await bench(Faulty, lambda prompt: "Hello.", act=leaves_a_call)
    made.policy.before = lambda: asyncio.sleep(60 if SLOW in made.policy.prompts[-1] else 0)
    sample = await made.run()
    with pytest.raises(UserError, match="the rollout has ended"):
        await asyncio.wait_for(left[0], 5)
    assert (sample.reward.total_reward, len(sample.turns), made.slots.num_leased) == (1.0, 1, 0)


def test_a_rollout_that_is_no_coroutine_is_refused_when_it_is_loaded() -> None:
    class Plain(Agent):
        def rollout(self, sample: Sample, context: RolloutContext) -> RewardResult:  # type: ignore[override]
            return RewardResult(1.0)

    with pytest.raises(UserError, match="write `async def rollout`"):
        complete_class(Plain, "plain")


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


async def test_an_agent_of_an_eval_begins_with_its_first_slot(bench: Any) -> None:
    """An eval starts all samples at once, so that its last agents would time out before their first call."""
    made = await bench(WaitsForItsTurn, lambda prompt: "4")
    slots = made.slots = RequestSlotPool([1])
    slots.set_up(0, True)
    WaitsForItsTurn.waiting.clear()
    samples = await asyncio.gather(*(made.run(for_eval=True) for _ in range(4)))
    assert [sample.failure_message for sample in samples] == [None] * 4
    assert max(WaitsForItsTurn.waiting) == 1
    assert slots.num_used == 0


class WaitsForItsTurn(Agent):
    waiting: ClassVar[list[int]] = []
    """How many agents were without their first answer as another began."""
    without_answer = 0

    async def rollout(self, sample: Sample, context: RolloutContext) -> RewardResult:
        self.without_answer += 1
        self.waiting.append(self.without_answer)
        await asyncio.sleep(0.01)
        await ask(context)
        self.without_answer -= 1
        await ask(context)
        return RewardResult(1.0)
