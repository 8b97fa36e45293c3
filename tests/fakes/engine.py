"""Simulates an engine whose requests progress, pause, resume and end.

Owns the length and speed of answers, how many run at once, and what a pause, an abort or a weight update does to
running requests. Knows no HTTP. Answers are a pure function of the prompt, the request's seed and the settings,
whatever the order of arrival, as vLLM's are with per-request seeds.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec


class FakeEngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the fake engine. Times in seconds, lengths in tokens."""

    mean_tokens: float = 32.0
    """Mean answer length; every answer also ends at its request's `max_tokens`."""
    length_sigma: float = 0.0
    """Sigma of the log-normal length distribution; 0 makes every answer `mean_tokens` long."""
    tokens_per_second: float = 0.0
    """Speed of one request; 0 samples the whole answer at once."""
    prefill_seconds: float = 0.0
    max_running: int | None = None
    """Requests that run at once; the others queue, lowest priority value first. None: all."""
    max_model_len: int = 1_000_000
    scheduling_policy: str = "priority"
    vocabulary: int = 1_000
    end_token: int | None = 0
    """Last token of an answer that was not cut; None ends without one."""
    vllm_version: str = "0.32.0"
    """Whose answers to imitate: 0.26 writes logprobs and versions differently from 0.32."""
    update_seconds: float = 0.0
    """Duration of one `/update_weights`."""
    start_seconds: float = 0.0
    """Time before the server listens."""
    fail_start: str | None = None
    """Print this and exit with code 1 instead of starting."""
    error_every: int | None = None
    """Answer 500 to every n-th generate request."""
    spawn_child: bool = False
    """Start a child process, as vLLM starts its engine core."""


@dataclass(eq=False, slots=True)
class FakeRequest:
    """One request in the engine. `total` tokens will be sampled; `done` resolves with its finish reason."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    seed: int
    priority: int
    salt: str | None
    done: asyncio.Future[str]
    answer: list[int] | None = None
    total: int = 0
    finish_reason: str = "stop"
    produced: float = 0.0
    running: bool = False
    since: float = 0.0
    versions: list[tuple[str, int]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None

    @property
    def num_tokens(self) -> int:
        return min(self.total, int(self.produced + 1e-9))


AnswerFunction = Callable[[FakeRequest], list[int]]


class FakeEngine:
    """The simulation. `answer` maps a request to its tokens (end token included); None generates some."""

    def __init__(self, settings: FakeEngineSettings, answer: AnswerFunction | None = None) -> None:
        self.settings = settings
        self.paused = False
        self.label = "default"
        self.update_active = False
        self.num_updates = 0
        self.num_finished = 0
        self.num_aborted = 0
        self.num_sampled_tokens = 0
        """Tokens of all ended requests, however they ended."""
        self.salts: dict[str, str | None] = {}
        """Salt of every request by id, in order of admission."""
        self.transfer_info: list[dict[str, object]] = []
        self.requests: dict[str, FakeRequest] = {}
        self._answer = answer
        self._waiting: list[tuple[int, int, FakeRequest]] = []
        self._order = itertools.count()
        self._num_running = 0

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - self._num_running

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, seed: int | None, priority: int, salt: str | None
    ) -> FakeRequest:
        """Queues a request and starts what can start. Await `done` of the result."""
        if seed is None:
            seed = random.getrandbits(32)
        key = zlib.crc32(repr((seed, len(prompt), prompt[:32], prompt[-32:])).encode())
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        request = FakeRequest(request_id, prompt, max_tokens, key, priority, salt, future)
        if self._answer is not None:
            request.answer = self._answer(request)
            wanted = len(request.answer)
        else:
            wanted = self._draw_length(key)
        room = self.settings.max_model_len - len(prompt)
        request.total = max(1, min(wanted, max_tokens, room))
        request.finish_reason = "stop" if wanted <= request.total else "length"
        self.requests[request_id] = request
        self.salts[request_id] = salt
        heapq.heappush(self._waiting, (priority, next(self._order), request))
        self._start_waiting()
        return request

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """Ends these requests (None: all) with the tokens so far. Returns their number."""
        ids = list(self.requests) if request_ids is None else [i for i in request_ids if i in self.requests]
        now = asyncio.get_running_loop().time()
        for request_id in ids:
            self._stop_clock(self.requests[request_id], now)
            self.num_aborted += 1
            self._end(self.requests[request_id], "abort")
        return len(ids)

    def _draw_length(self, key: int) -> int:
        sigma = self.settings.length_sigma
        if sigma == 0:
            return max(1, round(self.settings.mean_tokens))
        mu = math.log(self.settings.mean_tokens) - sigma**2 / 2  # so that the mean is mean_tokens
        return max(1, round(random.Random(key).lognormvariate(mu, sigma)))

    def _start_waiting(self) -> None:
        limit = self.settings.max_running
        while not self.paused and self._waiting and (limit is None or self._num_running < limit):
            _, _, request = heapq.heappop(self._waiting)
            if request.request_id not in self.requests or request.running:
                continue
            request.running = True
            request.versions.append((self.label, 0))
            self._num_running += 1
            self._start_clock(request, self.settings.prefill_seconds)

    def _start_clock(self, request: FakeRequest, delay: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        rate = self.settings.tokens_per_second
        request.since = loop.time() + delay
        seconds = (request.total - request.produced) / rate if rate > 0 else 0.0
        request.timer = loop.call_later(delay + seconds, self._finish, request)

    def _stop_clock(self, request: FakeRequest, now: float) -> None:
        if request.timer is None:
            return
        request.timer.cancel()
        request.timer = None
        rate = self.settings.tokens_per_second
        request.produced = min(request.total, request.produced + max(0.0, now - request.since) * rate)

    def _finish(self, request: FakeRequest) -> None:
        request.produced = request.total
        self.num_finished += 1
        self._end(request, request.finish_reason)

    def _end(self, request: FakeRequest, reason: str) -> None:
        del self.requests[request.request_id]
        self.num_sampled_tokens += request.num_tokens
        if request.running:
            self._num_running -= 1
        if not request.done.done():
            request.done.set_result(reason)
        self._start_waiting()

    # --- pause and weights ------------------------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """Freezes (`keep`) or aborts running requests, and starts no other until `resume`."""
        self.paused = True
        if mode == "abort":
            self.abort(None)
            return
        now = asyncio.get_running_loop().time()
        for request in self.requests.values():
            self._stop_clock(request, now)

    def resume(self) -> None:
        self.paused = False
        for request in list(self.requests.values()):
            if request.running and request.timer is None:
                self._start_clock(request)
        self._start_waiting()

    def finish_update(self, label: str | None) -> None:
        """Sets the new version for running requests from their current token on."""
        self.update_active = False
        self.num_updates += 1
        if label is None:
            return
        self.label = label
        for request in self.requests.values():
            if request.running:
                request.versions.append((label, request.num_tokens))
