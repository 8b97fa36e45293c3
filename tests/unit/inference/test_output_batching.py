"""Tokens that an engine hands out some at a time: all of them arrive, in order, and what must not wait does not."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.inference.vllm.output_batching import OutputBatcher, is_plain

CLIENT = 0


class Logprobs(NamedTuple):
    """As vLLM's `LogprobsLists`."""

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None


class Output(msgspec.Struct, array_like=True, omit_defaults=True):
    """As vLLM's `EngineCoreOutput`, with fewer of its fields."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Logprobs | None = None
    finish_reason: int | None = None
    stop_reason: int | None = None
    prefill_stats: object | None = None
    trace_headers: dict[str, str] | None = None
    num_nans_in_logits: int = 0


class Message(msgspec.Struct):
    """As vLLM's `EngineCoreOutputs`."""

    outputs: list[Output] = []


def logprobs_of(tokens: list[int]) -> Logprobs:
    return Logprobs(np.array([[t] for t in tokens]), np.array([[-t / 10] for t in tokens]), np.array(tokens) % 7)


def output(request_id: str, tokens: list[int], **fields: Any) -> Output:
    return Output(request_id, tokens, logprobs_of(tokens), **fields)


def sent(gatherer: OutputBatcher, *outputs: Output, may_hold: bool = True, client: int = CLIENT) -> list[Output]:
    messages = {client: Message(list(outputs))}
    gatherer.gather(messages, lambda _: may_hold)
    return list(messages[client].outputs)


def released(gatherer: OutputBatcher, *outputs: Output) -> dict[int, list[Output]]:
    messages = {CLIENT: Message(list(outputs))} if outputs else {}
    gatherer.release(messages, Message)
    return {client: list(message.outputs) for client, message in messages.items()}


Event = tuple[str, str, int]
"""Kind, request, number of tokens."""
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "other", "finish", "release"]),
        st.sampled_from("abc"),
        st.integers(1, 4),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(1, 20))
def test_whatever_happens_every_token_arrives_once_in_order_with_its_own_logprob(
    events: list[Event], most: int
) -> None:
    gatherer = OutputBatcher(most)
    made: dict[str, list[int]] = {}
    arrived: dict[str, list[int]] = {}
    number = 0
    generation = 0
    for kind, name, count in events:
        request = f"{name}{generation}"
        tokens = list(range(number, number + count))
        number += count
        if kind == "release":
            came = [out for outputs in released(gatherer).values() for out in outputs]
            assert gatherer.num_held == 0
        else:
            made.setdefault(request, []).extend(tokens)
            fields: dict[str, Any] = {"other": {"prefill_stats": object()}, "finish": {"finish_reason": 1}}.get(
                kind, {}
            )
            came = sent(gatherer, output(request, tokens, **fields))
            if kind != "step":
                assert came, "an output that must not wait has waited"
            generation += kind == "finish"
        for out in came:
            arrived.setdefault(out.request_id, []).extend(out.new_token_ids)
            assert out.new_logprobs is not None
            assert out.new_logprobs.logprob_token_ids[:, 0].tolist() == out.new_token_ids
            assert out.new_logprobs.logprobs[:, 0].tolist() == [-token / 10 for token in out.new_token_ids]
            assert out.new_logprobs.sampled_token_ranks.tolist() == [token % 7 for token in out.new_token_ids]
    for outputs in released(gatherer).values():
        for out in outputs:
            arrived.setdefault(out.request_id, []).extend(out.new_token_ids)
    assert arrived == made


def test_tokens_go_out_when_there_are_enough_of_them() -> None:
    gatherer = OutputBatcher(3)
    assert sent(gatherer, output("a", [1])) == []
    assert sent(gatherer, output("a", [2])) == []
    (out,) = sent(gatherer, output("a", [3]))
    assert out.new_token_ids == [1, 2, 3]
    assert gatherer.num_held == 0


def test_what_finishes_a_request_takes_with_it_what_was_held_and_keeps_its_reason() -> None:
    gatherer = OutputBatcher(16)
    sent(gatherer, output("a", [1]), output("b", [7]))
    (out,) = sent(gatherer, output("a", [2], finish_reason=1, stop_reason=2))
    assert (out.new_token_ids, out.finish_reason, out.stop_reason) == ([1, 2], 1, 2)
    assert gatherer.num_held == 1


def test_a_request_that_may_not_wait_gets_every_token_at_once() -> None:
    gatherer = OutputBatcher(16)
    assert [out.new_token_ids for out in sent(gatherer, output("a", [1]), may_hold=False)] == [[1]]
    assert [out.new_token_ids for out in sent(gatherer, output("a", [2]), may_hold=False)] == [[2]]
    assert gatherer.num_held == 0


def test_a_release_puts_held_tokens_before_those_of_its_own_step_and_names_each_client() -> None:
    gatherer = OutputBatcher(16)
    sent(gatherer, output("a", [1]), output("b", [5]))
    sent(gatherer, output("c", [9]), client=4)
    came = released(gatherer, output("a", [2]))
    assert {client: [(out.request_id, out.new_token_ids) for out in outputs] for client, outputs in came.items()} == {
        CLIENT: [("a", [1, 2]), ("b", [5])],
        4: [("c", [9])],
    }


def test_a_request_that_was_ended_from_outside_is_forgotten_and_others_are_not() -> None:
    gatherer = OutputBatcher(16)
    sent(gatherer, output("a", [1]), output("b", [2]))
    gatherer.forget(lambda request_id: request_id == "a")
    assert [out.request_id for outputs in released(gatherer).values() for out in outputs] == ["b"]


def test_outputs_without_logprobs_are_gathered_too() -> None:
    gatherer = OutputBatcher(2)
    sent(gatherer, Output("a", [1]))
    (out,) = sent(gatherer, Output("a", [2]))
    assert (out.new_token_ids, out.new_logprobs) == ([1, 2], None)


@pytest.mark.parametrize(
    "fields",
    [{"finish_reason": 0}, {"prefill_stats": object()}, {"num_nans_in_logits": 3}],
    ids=lambda f: next(iter(f)),
)
def test_an_output_that_carries_anything_but_tokens_is_not_plain(fields: dict[str, Any]) -> None:
    assert is_plain(output("a", [1]))
    assert is_plain(output("a", [1], trace_headers={"traceparent": "00-1"}))
    assert not is_plain(output("a", [1], **fields))
    assert not is_plain(Output("a", []))
