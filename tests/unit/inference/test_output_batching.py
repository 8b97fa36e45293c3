"""Batched tokens all arrive in order, and outputs that must not wait are sent at once."""

from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.inference.vllm.output_batching import OutputBatcher, carries_tokens_only

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
    routed_experts: np.ndarray | None = None


class Message(msgspec.Struct):
    """As vLLM's `EngineCoreOutputs`."""

    outputs: list[Output] = []


def logprobs_of(tokens: list[int]) -> Logprobs:
    return Logprobs(np.array([[t] for t in tokens]), np.array([[-t / 10] for t in tokens]), np.array(tokens) % 7)


def output(request_id: str, tokens: list[int], **fields: Any) -> Output:
    return Output(request_id, tokens, logprobs_of(tokens), **fields)


def sent(batcher: OutputBatcher, *outputs: Output, may_wait: bool = True, client: int = CLIENT) -> list[Output]:
    messages = {client: Message(list(outputs))}
    batcher.buffer(messages, lambda _: may_wait)
    return list(messages[client].outputs)


def released(batcher: OutputBatcher, *outputs: Output) -> dict[int, list[Output]]:
    messages = {CLIENT: Message(list(outputs))} if outputs else {}
    batcher.release(messages, Message)
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
def test_every_token_arrives_once_in_order_with_its_logprob(events: list[Event], most: int) -> None:
    batcher = OutputBatcher(most)
    made: dict[str, list[int]] = {}
    arrived: dict[str, list[int]] = {}
    number = 0
    generation = 0
    for kind, name, count in events:
        request = f"{name}{generation}"
        tokens = list(range(number, number + count))
        number += count
        if kind == "release":
            came = [out for outputs in released(batcher).values() for out in outputs]
            assert batcher.num_buffered == 0
        else:
            made.setdefault(request, []).extend(tokens)
            fields: dict[str, Any] = {"other": {"prefill_stats": object()}, "finish": {"finish_reason": 1}}.get(
                kind, {}
            )
            came = sent(batcher, output(request, tokens, **fields))
            if kind != "step":
                assert came, "an output that must not wait has waited"
            generation += kind == "finish"
        for out in came:
            arrived.setdefault(out.request_id, []).extend(out.new_token_ids)
            assert out.new_logprobs.logprob_token_ids[:, 0].tolist() == out.new_token_ids
            assert out.new_logprobs.logprobs[:, 0].tolist() == [-token / 10 for token in out.new_token_ids]
            assert out.new_logprobs.sampled_token_ranks.tolist() == [token % 7 for token in out.new_token_ids]
    for outputs in released(batcher).values():
        for out in outputs:
            arrived.setdefault(out.request_id, []).extend(out.new_token_ids)
    assert arrived == made


def test_a_finishing_output_carries_the_buffered_tokens_and_its_reason() -> None:
    batcher = OutputBatcher(16)
    sent(batcher, output("a", [1]), output("b", [7]))
    (out,) = sent(batcher, output("a", [2], finish_reason=1, stop_reason=2))
    assert (out.new_token_ids, out.finish_reason, out.stop_reason) == ([1, 2], 1, 2)
    assert batcher.num_buffered == 1


def test_a_request_that_may_not_wait_gets_every_token_at_once() -> None:
    batcher = OutputBatcher(16)
    assert [out.new_token_ids for out in sent(batcher, output("a", [1]), may_wait=False)] == [[1]]
    assert [out.new_token_ids for out in sent(batcher, output("a", [2]), may_wait=False)] == [[2]]
    assert batcher.num_buffered == 0


def test_a_release_sends_buffered_tokens_first_to_each_client() -> None:
    batcher = OutputBatcher(16)
    sent(batcher, output("a", [1]), output("b", [5]))
    sent(batcher, output("c", [9]), client=4)
    came = released(batcher, output("a", [2]))
    assert {client: [(out.request_id, out.new_token_ids) for out in outputs] for client, outputs in came.items()} == {
        CLIENT: [("a", [1, 2]), ("b", [5])],
        4: [("c", [9])],
    }


def test_only_an_aborted_request_is_dropped() -> None:
    batcher = OutputBatcher(16)
    sent(batcher, output("a", [1]), output("b", [2]))
    batcher.forget(lambda request_id: request_id == "a")
    assert [out.request_id for outputs in released(batcher).values() for out in outputs] == ["b"]


def test_outputs_without_logprobs_are_buffered_too() -> None:
    batcher = OutputBatcher(2)
    sent(batcher, Output("a", [1]))
    (out,) = sent(batcher, Output("a", [2]))
    assert (out.new_token_ids, out.new_logprobs) == ([1, 2], None)


@pytest.mark.parametrize("fields", [
    {"finish_reason": 0}, {"prefill_stats": object()}, {"num_nans_in_logits": 3},
], ids=lambda f: next(iter(f)))  # fmt: skip
def test_an_output_with_other_fields_is_not_buffered(fields: dict[str, Any]) -> None:
    assert carries_tokens_only(output("a", [1]))
    assert carries_tokens_only(output("a", [1], trace_headers={"traceparent": "00-1"}))
    assert not carries_tokens_only(output("a", [1], **fields))
    assert not carries_tokens_only(Output("a", []))


def test_a_full_batch_of_tokens_is_sent_with_its_routes_in_order() -> None:
    batcher = OutputBatcher(most=3)
    routes = [np.full((1, 2, 2), token, np.uint8) for token in (1, 2, 3)]
    steps = [output("a", [token], routed_experts=routes[token - 1]) for token in (1, 2, 3)]
    assert sent(batcher, steps[0]) == []
    assert sent(batcher, steps[1]) == []
    (message,) = sent(batcher, steps[2])
    assert message.new_token_ids == [1, 2, 3]
    np.testing.assert_array_equal(message.routed_experts, np.concatenate(routes))
    assert batcher.num_buffered == 0
