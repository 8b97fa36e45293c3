"""User code in steps: plain code outside of the event loop, awaitables inside of it.

A request is played by a generator. It yields each awaitable that it has to wait for and is resumed with the result, or
with the error thrown in; what it returns is the answer. So plain user code always runs outside of any event loop, where
it may call `asyncio.run` itself, even after something was awaited.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Generator
from typing import Any

Steps = Generator[Awaitable[Any], Any, tuple[dict[str, Any], bytes]]
"""Ends with the fields and the blob of the answer."""


def settled(value: Any) -> Generator[Awaitable[Any], Any, Any]:
    """`result = yield from settled(f())` for an `f` that may be plain or async."""
    if inspect.isawaitable(value):
        return (yield value)
    return value


async def settle(result: Awaitable[Any]) -> Any:
    """A coroutine for any awaitable, so that it can be made a task."""
    return await result
