"""The environments of a rollout worker: user code in this process, with deadlines.

Synchronous user code runs in one thread, one call at a time, outside any event loop, so that it may call `asyncio.run`
and need not be safe for threads. Awaitables that it returns run in the worker's event loop, beside other rollouts. A
call that exceeds its deadline is an environment failure. If it was synchronous its thread cannot be ended: another
thread takes over, and `is_stuck` asks for a new process.

A copy of the process that user code forks exits when that code returns.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from telescope.environments.base import wrapped_environment
from telescope.environments.context import MODEL
from telescope.environments.judge import USAGE
from telescope.environments.sandbox_tools import close_pools
from telescope.environments.serialization import MalformedResultError
from telescope.environments.types import Advance, FirstPrompt, PreparedPrompt, RewardRecord
from telescope.environments.user_code import (
    DeadlinePassed,
    Steps,
    error_text,
    original_error,
    user_code_line,
    within,
    without_exit,
)
from telescope.errors import EnvironmentFailure, InfrastructureError
from telescope.rollout.context import AgentRollout
from telescope.rollout.conversations import Completion
from telescope.rollout.endpoint import Endpoint
from telescope.rollout.environment_runner import EnvironmentRunner
from telescope.rollout.sample import Rollout

logger = logging.getLogger(__name__)

MAX_RESULT_BYTES = 32 * 2**20
"""Largest result of user code, because it passes through the driver's memory into the record."""

CLOSE_SECONDS = 20.0
"""Time for the environments to end rollouts and close resources."""

R = TypeVar("R")


class LoadedEnvironments:
    """`Environments` over a runner, by the identities of its specs.

    `timeout_seconds` bounds a call of user code, and `start_timeout_seconds` the preparation of resources.
    """

    def __init__(
        self, runner: EnvironmentRunner, *, timeout_seconds: float, start_timeout_seconds: float = 600.0
    ) -> None:
        self.is_stuck = False
        """A thread is still in user code past its deadline."""
        self._runner = runner
        self._positions = {spec.identity: position for position, spec in enumerate(runner.specs)}
        self._timeout, self._start_timeout = timeout_seconds, start_timeout_seconds
        self._pid = os.getpid()
        self._thread = ThreadPoolExecutor(1, "user code")
        self._rollouts: dict[str, tuple[str, asyncio.Task[Any] | None]] = {}
        """Label and running call of each open rollout."""
        found = [wrapped_environment(each) for each in runner.environments]
        self._agents = [each for each in found if each is not None and each.rollout is not None]
        self._endpoint = Endpoint([MODEL, *([runner.renderer.spec.tokenizer_path] if runner.renderer else [])])

    async def start(self) -> None:
        """Opens the endpoint for agents, if an environment has any, and prepares the resources of this process."""
        if self._agents:
            # A path of a Unix socket has at most 107 characters.
            self._folder = tempfile.TemporaryDirectory(prefix="telescope-", ignore_cleanup_errors=True)
            socket = Path(self._folder.name, "endpoint")
            await self._endpoint.start(socket)
            for environment in self._agents:
                environment.endpoint_socket = str(socket)
        await self._runner.prepare_own_resources()

    async def prepare(self, env_key: str, index: int) -> PreparedPrompt:
        """Renders and tokenizes the prompt of a dataset item."""
        label = f"environment {env_key!r}, item {index}: preparing the prompt"
        return await self._in_thread(partial(self._runner.prepare, self._positions[env_key], index), label)

    async def advance(
        self, env_key: str, index: int, completion_token_ids: np.ndarray, stop_reason: str, *, for_eval: bool = False
    ) -> Advance:
        """Scores the completion of a single-turn environment: its reward, or the metrics of an evaluation."""
        method = "compute_eval_metrics" if for_eval else "compute_reward"
        position, ids = self._positions[env_key], np.asarray(completion_token_ids).tolist()
        USAGE.set({})
        await self.prepare_resources(position)
        steps = self._runner.score(position, index, ids, stop_reason, for_eval=for_eval)
        return await self._timed(steps, f"environment {env_key!r}, item {index}: {method}")

    async def begin(self, rollout: str, env_key: str, index: int, *, interleaved: bool = True) -> FirstPrompt:
        """Begins a multi-turn rollout. `interleaved` False renders the whole conversation for every turn."""
        label = f"environment {env_key!r}, item {index}, rollout {rollout!r}"
        USAGE.set({})
        position = self._positions[env_key]
        steps = self._runner.begin(rollout, position, index, interleaved=interleaved)
        self._rollouts[rollout] = label, None

        async def begin() -> FirstPrompt:
            await self.prepare_resources(position)
            return await self._steps(steps, f"{label}: begin")

        return await self._of_rollout(rollout, begin())

    async def respond(
        self,
        rollout: str,
        completion_token_ids: np.ndarray,
        completion_logprobs: np.ndarray,
        stop_reason: str,
        *,
        max_context: int | None = None,
        for_eval: bool = False,
    ) -> Advance:
        """Passes a completion to the rollout's environment. A next prompt of `max_context` tokens ends the rollout."""
        if rollout not in self._rollouts:
            raise ValueError(f"the rollout {rollout!r} is not open")
        ids, logprobs = (np.asarray(values).tolist() for values in (completion_token_ids, completion_logprobs))
        completion = Completion(ids, logprobs, stop_reason, max_context, for_eval)
        steps = self._runner.conversations.respond(rollout, completion)
        advance = await self._of_rollout(rollout, self._timed(steps, f"{self._rollouts[rollout][0]}: respond"))
        if advance.done:
            del self._rollouts[rollout]
        return advance

    def cancel(self, rollout: str) -> None:
        """Ends a rollout at once. Ignores unknown ids."""
        label, call = self._rollouts.pop(rollout, ("", None))
        if call is not None:
            call.cancel()
        if label:
            self._end(rollout, label)

    async def roll_out(self, rollout: Rollout) -> RewardRecord:
        """Runs the `rollout` of an environment, which samples turns of this one. Returns its score."""
        task = rollout.task
        position = self._positions[task.environment_key]
        environment = wrapped_environment(self._runner.environments[position])
        assert environment is not None and self._runner.renderer is not None
        await self.prepare_resources(position)
        agent = AgentRollout(rollout, environment, self._runner.renderer, self._endpoint)
        try:
            return await agent.run(self._runner.environments[position].get_sample(task.item_index))
        except Exception as error:
            raise _failure(error, f"environment {task.environment_key!r}, item {task.item_index}: rollout") from None

    async def close(self) -> None:
        """Ends open rollouts, and closes resources."""
        await self._endpoint.stop()

        async def close_resources() -> None:
            await self._runner.close()
            for environment in self._agents:
                await close_pools(environment)

        try:
            await asyncio.wait_for(close_resources(), CLOSE_SECONDS)
        except TimeoutError:
            logger.warning("Ending rollouts and resources took over %g seconds", CLOSE_SECONDS)

    async def _of_rollout(self, rollout: str, call: Coroutine[Any, Any, R]) -> R:
        """Awaits the call of a rollout, which is over if it fails."""
        task = asyncio.ensure_future(call)
        label, _ = self._rollouts[rollout]
        self._rollouts[rollout] = label, task
        try:
            result = await task
        except (EnvironmentFailure, InfrastructureError):
            if self._rollouts.pop(rollout, None) is not None:
                self._end(rollout, label)
            raise
        if rollout in self._rollouts:
            self._rollouts[rollout] = label, None
        return result

    def _end(self, rollout: str, label: str) -> None:
        """Lets the environment end a rollout, if it began."""

        async def end() -> None:
            try:
                await self._steps(self._runner.conversations.end(rollout), f"{label}: end")
            except (EnvironmentFailure, InfrastructureError) as error:
                logger.warning("%s", error)

        asyncio.ensure_future(end())  # noqa: RUF006 (the environments live as long as the loop)

    async def prepare_resources(self, position: int) -> None:
        """Waits until the resources of an environment are prepared."""
        label = f"environment {self._runner.specs[position].identity!r}: prepare_resources"
        try:
            await asyncio.wait_for(self._runner.resources[position].ready(), self._start_timeout)
        except TimeoutError:
            raise EnvironmentFailure(f"{label} did not end within {self._start_timeout:g} seconds") from None
        except Exception as error:
            raise _failure(error, label) from None

    # Steps

    async def _timed(self, steps: Steps[Advance], label: str) -> Advance:
        started = time.perf_counter()
        advance = await self._steps(steps, label)
        if (size := len(msgspec.json.encode(advance))) > MAX_RESULT_BYTES:
            what = f"the environment's result has {size} bytes; the limit is {MAX_RESULT_BYTES}"
            raise EnvironmentFailure(f"{label} failed: {what}")
        return replace(advance, seconds=time.perf_counter() - started)

    async def _steps(self, steps: Steps[R], label: str) -> R:
        """Takes the steps of a call: synchronous ones in the thread of user code, awaitables in the event loop.

        A call that is cancelled or exceeds its deadline can still clean up. Synchronous code always ends its step.
        """
        resume: Callable[[], Awaitable[Any]] = partial(next, steps)
        verdict: BaseException | None = None
        while True:
            step = asyncio.ensure_future(self._in_thread(partial(_step, resume), label))
            cancelled: asyncio.CancelledError | None = None
            try:
                try:
                    is_done, result = await asyncio.shield(step)
                except asyncio.CancelledError as error:
                    verdict = cancelled = error
                    is_done, result = await step
            except (EnvironmentFailure, InfrastructureError) as error:
                raise verdict or error from None
            if is_done:
                if verdict is not None:
                    raise verdict
                return result
            waiting = asyncio.ensure_future(without_exit(result))
            try:
                if cancelled is not None:
                    waiting.cancel()
                value = await within(self._timeout, waiting)
            except asyncio.CancelledError as error:
                verdict = verdict or error
                resume = partial(steps.throw, error)
            except DeadlinePassed as error:
                verdict = EnvironmentFailure(f"{label} {error} (environment_timeout_seconds)")
                self.is_stuck = self.is_stuck or not waiting.done()
                resume = partial(steps.throw, asyncio.CancelledError())
            except Exception as error:
                resume = partial(steps.throw, error)
            else:
                resume = partial(steps.send, value)

    async def _in_thread(self, function: Callable[[], R], label: str) -> R:
        """Runs a synchronous function in the thread of user code, whose errors become those of a call."""
        loop = asyncio.get_running_loop()

        def run(began: asyncio.Future[None]) -> R:
            loop.call_soon_threadsafe(_set, began)
            try:
                return function()
            finally:
                if os.getpid() != self._pid:
                    os._exit(1)  # a copy forked by user code

        while True:
            began: asyncio.Future[None] = loop.create_future()
            running = loop.run_in_executor(self._thread, copy_context().run, run, began)
            either: set[asyncio.Future[Any]] = {began, running}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not running.cancelled():
                break  # else a call before it hangs, and another thread has taken over
        done, _ = await asyncio.wait({running}, timeout=self._timeout)
        if not done:
            self.is_stuck = True
            faulthandler.dump_traceback()
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = ThreadPoolExecutor(1, "user code")
            limit = f"{self._timeout:g} seconds (environment_timeout_seconds)"
            raise EnvironmentFailure(f"{label} did not end within {limit}; its stack is in the rollout worker's log")
        try:
            return running.result()
        except BaseException as error:
            raise _failure(error, label) from None


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _step(resume: Callable[[], Any]) -> tuple[bool, Any]:
    """Takes one step. Returns whether it was the last, and its result or what it waits for."""
    try:
        return False, resume()
    except StopIteration as end:
        return True, end.value


def _failure(error: BaseException, label: str) -> Exception:
    """Returns what a call of user code raises: with the file and the line of the error's origin."""
    traceback.print_exception(error)
    kind = InfrastructureError if isinstance(error, InfrastructureError) else EnvironmentFailure
    error = original_error(error)
    # A malformed result has no line in user code, and the line of ours that rejects it does not help.
    where = None if isinstance(error, MalformedResultError) else user_code_line(error)
    return kind(f"{label} failed: {error_text(error)}" + (f" ({os.path.basename(where)})" if where else ""))
