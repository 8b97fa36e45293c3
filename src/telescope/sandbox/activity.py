"""Records the sandbox activity of a process: a span per provider call, and which sandboxes are alive.

A context variable holds the collector, so calls of user code find it in any task. Without a collector nothing is
recorded. `SAMPLE` is the sample that a call belongs to.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])

MAX_SPANS = 20_000
"""Spans that wait for the next `take`. Later ones are only counted."""

SAMPLE: ContextVar[str] = ContextVar("sample of a sandbox's user", default="")


@dataclass(slots=True)
class SandboxSpan:
    """One provider call, or a wait in a pool's queue (`queue`). Times are `time.time()`."""

    kind: str
    provider: str
    sandbox_id: str
    start: float
    end: float
    error: str = ""
    """Class of the error that it raised."""
    sample_id: str = field(default_factory=SAMPLE.get)


@dataclass
class Activity:
    """Collects the spans and counts of one process. Safe to use from all of its threads."""

    spans: list[SandboxSpan] = field(default_factory=list)
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of spans by kind, provider and error, including dropped spans."""
    alive: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Ids of sandboxes by provider."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, span: SandboxSpan) -> None:
        """Records a span, and updates which sandboxes are alive."""
        with self._lock:
            if span.kind == "create" and not span.error:
                self.alive[span.provider].add(span.sandbox_id)
            if span.kind == "destroy" and not span.error:
                self.alive[span.provider].discard(span.sandbox_id)
            self.counts[span.kind, span.provider, span.error] += 1
            if len(self.spans) < MAX_SPANS:
                self.spans.append(span)

    def take(self) -> tuple[list[SandboxSpan], Counter[tuple[str, str, str]], dict[str, int]]:
        """Returns the spans and counts since the last call, and the number of live sandboxes by provider."""
        with self._lock:
            taken = self.spans, self.counts
            self.spans, self.counts = [], Counter()
            return *taken, {provider: len(ids) for provider, ids in self.alive.items()}


CURRENT: ContextVar[Activity | None] = ContextVar("sandbox activity", default=None)


def measured(kind: str, method: Method) -> Method:
    """Wraps a method of a provider or pool so that each call is recorded as a span."""

    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        activity = CURRENT.get()
        if activity is None:
            return await method(self, *args, **kwargs)
        handle = next((value for value in (*args, *kwargs.values()) if hasattr(value, "provider_data")), None)
        span = SandboxSpan(kind, self.name, handle.id if handle is not None else "", time.time(), 0.0)
        try:
            result = await method(self, *args, **kwargs)
            span.sandbox_id = span.sandbox_id or result.id
            return result
        except BaseException as error:
            span.error = type(error).__name__
            raise
        finally:
            span.end = time.time()
            activity.add(span)

    return cast(Method, call)
