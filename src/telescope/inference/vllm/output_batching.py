"""What running requests sampled, sent out of the engine some tokens at a time in place of one by one.

vLLM sends a message for every token of every request from the process that computes to the one that speaks HTTP. For an
answer that is only wanted whole, this is work for nobody, and with logprobs it is most of what either process does: at
256 requests on an H200 the engine's steps took 10.4 ms instead of 6.4, and the other process, at 40 to 70 microseconds
a token, could not keep up at all. It then has no time for its connections, so that for seconds no answer leaves it and
the engine runs out of requests (`benchmarks/engine_steps.py`, docs/log.md).

Owns what is held. Which requests are, is the scheduler's to say (`vllm/scheduler`). Invariants: tokens and logprobs of
a request come out as they went in, none missing, in order; the output that finishes a request is never held, nor one
that carries anything but tokens and logprobs, and what was held goes out with it; nothing is held after `release`.

Knows vLLM's structs by the names of their fields and imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter, is_not
from typing import Any

import numpy as np

HELD_TOKENS = 16
"""A request's tokens go out when there are so many: nearly all of the gain, and counters of vLLM that lag by little."""

PLAIN = frozenset(("request_id", "new_token_ids", "new_logprobs", "stop_reason", "trace_headers"))
"""Fields of an output that may be held. One with a value in any other field is passed on."""

LOGPROB_ARRAYS = ("logprob_token_ids", "logprobs", "sampled_token_ranks")


class _Held:
    """Outputs of one request in a row. The first of them carries the tokens of all."""

    __slots__ = ("client", "logprobs", "output")

    def __init__(self, client: int, output: Any) -> None:
        self.client = client
        self.output = output
        output.new_token_ids = list(output.new_token_ids)
        self.logprobs = [] if output.new_logprobs is None else [output.new_logprobs]

    def add(self, output: Any) -> None:
        self.output.new_token_ids.extend(output.new_token_ids)
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)

    def into(self, output: Any) -> Any:
        """`output` with everything that was held in it."""
        output.new_token_ids = self.output.new_token_ids
        output.new_logprobs = _joined(self.logprobs)
        return output


class OutputBatcher:
    """Holds outputs back until there are `most` tokens of a request, or there is a reason to send them."""

    def __init__(self, most: int = HELD_TOKENS) -> None:
        self._most = most
        self._held: dict[str, _Held] = {}

    @property
    def num_held(self) -> int:
        """Requests of which something is held."""
        return len(self._held)

    def gather(self, messages: dict[int, Any], may_hold: Callable[[Any], bool]) -> None:
        """Take out of one step's messages, by client, what can wait; add what has waited long enough.

        `may_hold(output)` says whether the request of a plain output may wait; it is asked when nothing of it is held.
        This runs for every token of every request in the engine's own loop, so it is written to be quick.
        """
        held_by_request, most = self._held, self._most
        for client, message in messages.items():
            sent = []
            for output in message.outputs:
                held = held_by_request.get(output.request_id)
                if held is not None:
                    held.add(output)
                    if len(held.output.new_token_ids) >= most or not is_plain(output):
                        del held_by_request[output.request_id]
                        sent.append(held.into(output))
                elif len(output.new_token_ids) < most and is_plain(output) and may_hold(output):
                    held_by_request[output.request_id] = _Held(client, output)
                else:
                    sent.append(output)
            message.outputs = sent

    def release(self, messages: dict[int, Any], new_message: Callable[[], Any]) -> None:
        """Add everything that is held to one step's messages, before what the step itself brought of a request."""
        for message in messages.values():
            message.outputs = [
                output if (held := self._held.pop(output.request_id, None)) is None else _with(held, output)
                for output in message.outputs
            ]
        for held in self._held.values():
            if held.client not in messages:
                messages[held.client] = new_message()
            messages[held.client].outputs.append(held.into(held.output))
        self._held.clear()

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Drop what is held of requests that were ended from outside: vLLM has answered them."""
        for request_id in [request_id for request_id in self._held if is_gone(request_id)]:
            del self._held[request_id]


def is_plain(output: Any) -> bool:
    """Whether it carries tokens, and nothing but them and their logprobs."""
    kind: Any = type(output)
    values_of, defaults = _other_fields(kind)
    return bool(output.new_token_ids) and not any(map(is_not, values_of(output), defaults))


@cache
def _other_fields(kind: Any) -> tuple[Callable[[Any], tuple[Any, ...]], tuple[Any, ...]]:
    """Of vLLM's struct: the values of all fields that a plain output does not use, and what they are then."""
    defaults = kind.__struct_defaults__
    fields = zip(kind.__struct_fields__[-len(defaults) :], defaults, strict=True)
    others = {name: default for name, default in fields if name not in PLAIN}
    return attrgetter(*others), tuple(others.values())


def _with(held: _Held, output: Any) -> Any:
    held.add(output)
    return held.into(output)


def _joined(parts: list[Any]) -> Any | None:
    """vLLM's logprobs of several steps as those of one."""
    if len(parts) < 2:
        return parts[0] if parts else None
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in LOGPROB_ARRAYS}
    return parts[0]._replace(**arrays)
