"""Batches outputs: tokens leave the engine 16 at a time.

vLLM sends a message for every token of every request from the engine process to the HTTP process. If only whole
responses are wanted, this is wasted, and with logprobs it is most of the work of both processes: at 256 requests on an
H200 the engine's steps took 10.4 ms instead of 6.4, and the HTTP process, at 40 to 70 microseconds a token, could not
keep up. It then does not respond for seconds, and the engine runs out of requests (`benchmarks/engine_steps.py`,
docs/performance.md).

Owns the buffered outputs. `scheduler` decides which requests may be buffered. Invariants: tokens and logprobs of a
request leave complete and in order; an output that finishes a request, or has anything but tokens and logprobs, is sent
at once together with the buffered outputs; nothing is buffered after `release`.

Accesses vLLM's structs by field names and imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter, is_not
from typing import Any

import numpy as np

BATCH_TOKENS = 16
"""Tokens per message: nearly all of the gain, while vLLM's counters lag by little."""

TOKEN_FIELDS = frozenset(
    ("request_id", "new_token_ids", "new_logprobs", "stop_reason", "trace_headers", "routed_experts")
)
"""Fields of an output that may be buffered. An output with a value in any other field is sent at once."""

LOGPROB_ARRAYS = ("logprob_token_ids", "logprobs", "sampled_token_ranks")


class _Buffered:
    """Buffered outputs of one request, merged into the first of them."""

    __slots__ = ("client", "logprobs", "output", "routes")

    def __init__(self, client: int, output: Any) -> None:
        self.client = client
        self.output = output
        output.new_token_ids = list(output.new_token_ids)
        self.logprobs = [] if output.new_logprobs is None else [output.new_logprobs]
        routes = getattr(output, "routed_experts", None)
        self.routes = [] if routes is None else [routes]

    def add(self, output: Any) -> _Buffered:
        self.output.new_token_ids.extend(output.new_token_ids)
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
        if (routes := getattr(output, "routed_experts", None)) is not None:
            self.routes.append(routes)
        return self

    def move_into(self, output: Any) -> Any:
        """Moves all buffered tokens into `output` and returns it."""
        output.new_token_ids = self.output.new_token_ids
        output.new_logprobs = parts[0] if (parts := self.logprobs) else None
        if len(parts) > 1:
            arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in LOGPROB_ARRAYS}
            output.new_logprobs = parts[0]._replace(**arrays)
        if self.routes:
            output.routed_experts = self.routes[0] if len(self.routes) == 1 else np.concatenate(self.routes)
        return output


class OutputBatcher:
    """Buffers up to `most` tokens of each request. Other rules send them earlier."""

    def __init__(self, most: int = BATCH_TOKENS) -> None:
        self._most = most
        self._buffered: dict[str, _Buffered] = {}

    @property
    def num_buffered(self) -> int:
        """Returns the number of requests with buffered outputs."""
        return len(self._buffered)

    def buffer(self, messages: dict[int, Any], may_wait: Callable[[Any], bool]) -> None:
        """Removes outputs that can wait from one step's messages, by client. Adds outputs that have waited long enough.

        `may_wait(output)` decides for a request with nothing buffered. This runs for every token of every request in
        the engine's own loop, so it is optimized for speed.
        """
        buffered_by_request, most = self._buffered, self._most
        for client, message in messages.items():
            sent = []
            for output in message.outputs:
                buffered = buffered_by_request.get(output.request_id)
                if buffered is not None:
                    buffered.add(output)
                    if len(buffered.output.new_token_ids) >= most or not carries_tokens_only(output):
                        del buffered_by_request[output.request_id]
                        sent.append(buffered.move_into(output))
                elif len(output.new_token_ids) < most and carries_tokens_only(output) and may_wait(output):
                    buffered_by_request[output.request_id] = _Buffered(client, output)
                else:
                    sent.append(output)
            message.outputs = sent

    def release(self, messages: dict[int, Any], new_message: Callable[[], Any]) -> None:
        """Adds buffered outputs to a step's messages, before the step's own."""
        for message in messages.values():
            message.outputs = [
                self._buffered.pop(output.request_id).add(output).move_into(output)
                if output.request_id in self._buffered
                else output
                for output in message.outputs
            ]
        for buffered in self._buffered.values():
            if buffered.client not in messages:
                messages[buffered.client] = new_message()
            messages[buffered.client].outputs.append(buffered.move_into(buffered.output))
        self._buffered.clear()

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Drops the buffered outputs of aborted requests: vLLM has already responded to them."""
        for request_id in [request_id for request_id in self._buffered if is_gone(request_id)]:
            del self._buffered[request_id]


def carries_tokens_only(output: Any) -> bool:
    """Returns whether the output has only tokens and their logprobs."""
    kind: Any = type(output)
    values_of, defaults = _other_fields(kind)
    return bool(output.new_token_ids) and not any(map(is_not, values_of(output), defaults))


@cache
def _other_fields(kind: Any) -> tuple[Callable[[Any], tuple[Any, ...]], tuple[Any, ...]]:
    """Returns a getter of vLLM's other fields, and their default values."""
    defaults = kind.__struct_defaults__
    fields = zip(kind.__struct_fields__[-len(defaults) :], defaults, strict=True)
    others = {name: default for name, default in fields if name not in TOKEN_FIELDS}
    return attrgetter(*others), tuple(others.values())
