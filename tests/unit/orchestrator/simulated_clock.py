"""An event loop with a simulated clock: waiting costs nothing, and a loop without events is a deadlock.

Time jumps to the next timer when no callback is ready, so that a run of hours takes milliseconds and is the same each
time. Work for threads is done in place.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Deadlock(AssertionError):
    """No callback is ready and no timer is set."""


class _JumpingSelector(selectors.SelectSelector):
    """Advances the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Deadlock("every task waits, and no timer is set")
        self.now += max(timeout, 0.0)
        return super().select(0)


class _InPlace(ThreadPoolExecutor):
    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **options))
        except BaseException as error:
            future.set_exception(error)
        return future


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on simulated time, from 0, in seconds."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)
        self.set_default_executor(_InPlace(1))

    def time(self) -> float:
        return self._clock.now


def run_simulated(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end on simulated time. Raises Deadlock, or what the coroutine raises."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(coroutine)
