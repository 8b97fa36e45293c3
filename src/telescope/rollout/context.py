"""Runs a rollout that a user wrote: implements `environments.context` with request slots, engines and sandboxes.

`AgentRollout` owns one such rollout from its first call to its score. Calls come from the environment's code or over
HTTP (`endpoint`), several at a time. An engine failure that outlasts the retries is remembered: even if the agent
swallows the error, the sample is masked and never scored as a failure of the policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from telescope.environments.base import ChatMessage, Environment, RewardResult, Sample
from telescope.environments.context import Answer, Call, RefusedCall, RolloutContext
from telescope.environments.judge import COMPLETE
from telescope.environments.records import eval_metrics_of
from telescope.environments.sandbox_tools import pool_of
from telescope.environments.serialization import finite_number, serialize_score
from telescope.environments.tool_template import tool_template
from telescope.environments.types import RewardRecord
from telescope.environments.user_code import DeadlinePassed, contain_exits, error_text, within, without_exit
from telescope.errors import EnvironmentFailure, InfrastructureError, UserError
from telescope.rollout.answers import parameters_of, parse_answer
from telescope.rollout.dialects import PASSED_ON, Refusal, sampling_of
from telescope.rollout.joins import Joins, Prompt
from telescope.rollout.messages import text_of
from telescope.rollout.rendering import Renderer
from telescope.rollout.sample import Rollout
from telescope.sandbox.errors import SandboxCommandTimeoutError
from telescope.sandbox.pool import Sandbox

if TYPE_CHECKING:
    from telescope.rollout.endpoint import Endpoint

KNOWN_SAMPLING = ("max_tokens", "stop")
"""Sampling parameters that a call may set. The run sets all others, because the trainer computes logprobs with them."""
SDK_MODULES = {"openai": ("chat", "responses"), "anthropic": ("messages",)}
"""Modules that an SDK would import at the first call."""
JUDGE = "judge"
"""Name of the conversations in which the policy judges."""


class AgentRollout:
    """The `Services` of one rollout."""

    def __init__(
        self,
        rollout: Rollout,
        environment: Environment,
        renderer: Renderer,
        endpoint: Endpoint,
        turns: Callable[[], Awaitable[RewardRecord]],
    ) -> None:
        """Prepares the rollout. `turns` runs the turn loop."""
        self._turns = turns
        self._rollout = rollout
        self._environment = environment
        self._renderer = renderer
        self._endpoint = endpoint
        self._joins = Joins(renderer, interleaved=rollout.settings.interleaved)
        self._failure: InfrastructureError | None = None
        self._counts: Counter[str] = Counter()
        """Metrics: replaced parameters of calls, refused requests, and completions that no client has read."""
        self._sandboxes: list[Sandbox] = []
        self._holders: set[asyncio.Task[Any]] = set()
        """Tasks that wait for an answer, a turn loop, a program or a sandbox."""
        self._loops: set[asyncio.Task[RewardRecord]] = set()
        """Turn loops, ended ones included."""
        self._has_reward = True
        self._is_over = False
        self.api_key = ""

    async def run(self, sample: Sample) -> RewardRecord:
        """Runs the environment's `rollout`. Returns its score.

        Raises what `rollout` raises, `EnvironmentFailure` when its time is over, and the first `InfrastructureError` of
        its calls.
        """
        environment, rollout = self._environment, self._rollout
        seconds = environment.rollout_timeout_seconds
        context = RolloutContext(self, time.monotonic() + seconds)
        contain_exits(asyncio.get_running_loop())
        COMPLETE.set(self._judge)
        await _import_sdks(type(environment))
        self.api_key = self._endpoint.open(self.complete, self._joins.count, self._drop, self._refused)
        rollout.trajectory.agent_started_at = time.time()
        try:
            result = await within(seconds, without_exit(environment.rollout(sample, context)))
        except DeadlinePassed:
            raise EnvironmentFailure(f"it did not end within {seconds:g} seconds (rollout_timeout_seconds)") from None
        except SandboxCommandTimeoutError as late:  # of the agent's own command, which would be late again
            why = f"{late}: raise its `timeout`, or catch SandboxCommandTimeoutError and return a reward"
            raise self._failure or EnvironmentFailure(why) from None
        except Exception:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            # A turn that a background task adds from now on would get no reward, or the reward of a new attempt.
            context.cancelled = self._is_over = True
            for task in self._holders:
                task.cancel()
            self._endpoint.close_rollout(self.api_key)
            for sandbox in self._sandboxes:
                await sandbox.close()
            for chat in (context, *context.chats.values()):
                await chat.close()
            await asyncio.gather(*self._loops, return_exceptions=True)
        if self._failure is not None:
            raise self._failure
        errors = filter(None, [context.program_error, *(sandbox.program_error for sandbox in self._sandboxes)])
        if not rollout.trajectory.turns and (error := next(errors, None)):
            raise EnvironmentFailure(f"it made no call that was answered; {error}")
        rollout.trajectory.chat_rewards = {
            name: finite_number(chat.reward, f"the reward of the chat {name!r}")
            for name, chat in context.chats.items()
            if chat.reward is not None
        }
        serialize_score(result, for_eval=False, method="rollout")
        counts = {**self._counts, "agent/calls": rollout.trajectory.totals.num_turns}
        rewards = {f"agent/reward_{name}": reward for name, reward in rollout.trajectory.chat_rewards.items()}
        result = replace(result, sample_metrics={**counts, **rewards, **context.metrics, **result.sample_metrics})
        for_eval = rollout.settings.for_eval
        if not for_eval:
            return RewardRecord(**serialize_score(result, for_eval))
        evaluated = eval_metrics_of(result)
        if not self._has_reward:
            del evaluated.metrics["reward"]
        return RewardRecord(**serialize_score(evaluated, for_eval))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        if self._is_over:
            raise UserError("the rollout has ended: await calls, programs and sandboxes before `rollout` returns")
        task = asyncio.current_task()
        assert task is not None
        self._holders.add(task)
        try:
            yield
        finally:
            self._holders.discard(task)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Holds a call of the policy, and remembers the first failure of an engine."""
        with self.held():
            try:
                yield
            except InfrastructureError as error:
                self._failure = self._failure or error
                raise

    async def complete(self, call: Call) -> Answer:
        """Samples a completion.

        Raises `RefusedCall`, `UserError` for a malformed call, and `InfrastructureError`.
        """
        settings = self._rollout.settings.sampling
        try:
            sampling = sampling_of(call.sampling, "max_tokens")
            if unknown := next((name for name in call.sampling if name not in (*KNOWN_SAMPLING, *PASSED_ON)), None):
                raise UserError(f"sampling has {unknown!r}: it takes {' and '.join(KNOWN_SAMPLING)}")
            parameters_of(call.tools)  # refuses malformed tools before a completion is sampled
            # Very long texts are refused by their length, because tokenizing them would block the event loop.
            least = (
                sum(len(text_of(message.get("content"))) for message in call.messages) // self._renderer.longest_token
            )
            prompt = self._joins.prompt(call) if least < settings.max_context else None
            shown = [(str(message["role"]), _shown(message)) for message in prompt.new_messages] if prompt else []
        except Exception as error:  # in messages, tools, token ids or sampling, or raised by the chat template
            why = str(error) if isinstance(error, UserError | Refusal) else error_text(error)
            raise UserError(f"This call of the policy is malformed: {why}") from error
        if call.tools and tool_template(self._renderer.tokenizer) is None:
            self._counts["agent/tools_outside_template"] += 1
        for name, value in call.sampling.items():
            if name not in KNOWN_SAMPLING and value != getattr(settings, name, None):
                self._counts[f"agent/replaced_{name}"] += 1
        num_tokens = len(prompt.token_ids) if prompt else least
        if prompt is None or num_tokens >= settings.max_context:
            raise RefusedCall(
                f"This model's maximum context length is {settings.max_context} tokens, and the messages have "
                f"{'' if prompt else 'at least '}{num_tokens} tokens. Please reduce the length of the messages."
            )
        with self._calling():
            index = await self._rollout.sample(
                prompt.token_ids, added_token_ids=prompt.added_token_ids, parent=prompt.parent, chat=call.chat,
                divergence=prompt.cause, renders_again=prompt.renders_again, trained=call.train,
                max_tokens=sampling.get("max_tokens"), stop=sampling.get("stop") or (), replies=shown,
            )  # fmt: skip
        return self._answer(call, prompt, index, sampling.get("stop") or ())

    def _answer(self, call: Call, prompt: Prompt, index: int, stops: Sequence[str]) -> Answer:
        """Parses the completion of a turn, and records it for later calls."""
        turn = self._rollout.trajectory.turns[index]
        generation = turn.generation
        ended = generation.finish_reason == "stop"
        ids = generation.token_ids_N.tolist()
        raw = self._renderer.decode(ids, cut_end_token=ended)
        found = [(raw.index(stop), stop) for stop in stops if ended and stop in raw]
        end, stop_text = min(found, default=(len(raw), None))
        opened = prompt.dialogue.opened
        text, reasoning, calls = parse_answer(raw[:end], opened=opened, tools=call.tools, is_cut=not ended)
        answer = Answer(
            text, reasoning, calls, "tool_calls" if calls and ended else generation.finish_reason, ids,
            generation.logprobs_N.tolist(), len(prompt.token_ids), raw, str(index), stop_text,
        )  # fmt: skip
        turn.text = raw
        turn.tool_calls = [
            {**shown["function"], "error": call.error, "seconds": None}
            for call, shown in zip(calls, answer.openai_tool_calls, strict=True)
        ]
        self._joins.record(call, prompt, answer.message, index, ids, raw, ended=ended)
        return answer

    def _drop(self, answer: Answer) -> None:
        """Excludes from training a completion that no client has read."""
        self._rollout.trajectory.turns[int(answer.id)].trained = False
        self._counts["agent/dropped_answers"] += 1

    def _refused(self, code: str) -> None:
        """Counts a request that got an error, which an agent's own code may catch."""
        self._counts[f"agent/refused_{code}"] += 1

    async def take_turns(self) -> RewardResult:
        with self._calling():
            task = asyncio.ensure_future(self._turns())
            self._loops.add(task)
            scored = await task
        self._has_reward = scored.total_reward is not None  # an evaluation may have none
        return RewardResult(**{**vars(scored), "total_reward": scored.total_reward or 0.0})

    async def judge(self, prompt: str, schema: Mapping[str, Any] | None, model: str | None) -> Any:
        if self._environment.judge is None:
            raise UserError(
                f"the environment {self._environment.name!r} has no judge: add `judge: {{url: ...}}` to its kwargs"
            )
        return await self._environment.judge.ask(prompt, schema, model)

    async def _judge(self, prompt: str) -> str:
        """Lets the policy act as the judge. Its tokens are not trained."""
        call = Call([{"role": "user", "content": prompt}], chat=JUDGE, train=False)
        return (await self.complete(call)).text

    async def sandbox(self, image: str | None) -> Sandbox:
        with self.held():
            pool = await pool_of(self._environment, image)
            sandbox = Sandbox(pool, await pool.acquire(), endpoint=self._endpoint.base_url(""))
        self._sandboxes.append(sandbox)
        return sandbox

    def base_url(self, chat: str) -> str:
        return self._endpoint.base_url(chat)


async def _import_sdks(environment: type[Environment]) -> None:
    """Imports the SDKs that the environment's methods name, in a thread, because that takes seconds."""
    code = [each.__code__ for cls in environment.__mro__ for each in vars(cls).values() if hasattr(each, "__code__")]
    for sdk, modules in SDK_MODULES.items():
        if any(sdk in each.co_names for each in code):
            with contextlib.suppress(ImportError):  # the environment may use another SDK here
                for module in modules:
                    await asyncio.to_thread(importlib.import_module, f"{sdk}.resources.{module}")


def _shown(message: ChatMessage) -> str:
    """Returns a message as it is recorded: its text, and its tool calls in the form of Hermes."""
    calls = [f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, (str(message.get("content") or ""), *calls)))
