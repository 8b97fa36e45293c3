"""Binary responses have the same tokens, logprobs and versions as vLLM's JSON, with JSON as the fallback."""

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.asgi import respond, send_request

from telescope.errors import InfrastructureError
from telescope.inference.vllm import adapter as wire
from telescope.inference.vllm.binary_responses import BinaryResponseMiddleware

ANSWERS = Path(__file__).parent / "answers"
ACCEPT = [(b"accept", f"{wire.PACKED_TYPE}, application/json".encode())]


def recorded(version: str, name: str) -> tuple[bytes, str | None]:
    answer = json.loads((ANSWERS / version / f"{name}.json").read_text())
    return json.dumps(answer["body"]).encode(), answer["spans_header"]


async def through_middleware(
    parts: list[bytes], *, status: int = 200, headers: list[Any] = ACCEPT, spans: str | None = None, path: str = ""
) -> tuple[int, dict[bytes, bytes], bytes]:
    """What a caller with `headers` gets where vLLM answers with `parts`."""

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        own = [(b"Content-Type", b"application/json"), (b"content-length", str(len(b"".join(parts))).encode())]
        if spans is not None:
            own.append((wire.VERSION_SPANS_HEADER.encode(), spans.encode()))
        await respond(send, *parts, status=status, headers=own)

    middleware = BinaryResponseMiddleware(vllm)
    response = await send_request(middleware, path or wire.GENERATE_ROUTE, headers=headers)
    return response.status, response.headers, response.body


@pytest.mark.parametrize("version", ["0.26", "0.32"])
@pytest.mark.parametrize("name", ["stop", "length", "abort", "two_versions"])
@pytest.mark.parametrize("cut", [10**9, 17])
async def test_recorded_answers_arrive_as_they_were(version: str, name: str, cut: int) -> None:
    body, spans = recorded(version, name)
    parts = [body[i : i + cut] for i in range(0, len(body), cut)]
    status, headers, packed = await through_middleware(parts, spans=spans)
    assert (status, headers[b"content-type"]) == (200, wire.PACKED_TYPE.encode())
    assert headers[b"content-length"] == str(len(packed)).encode()
    expected = wire.resolve_versions(wire.read_generate(body, spans_header=spans), initial_version=6)
    got = wire.resolve_versions(wire.unpack_answer(packed), initial_version=6)
    assert got.token_ids_N.tolist() == expected.token_ids_N.tolist()
    assert got.logprobs_N.tobytes() == expected.logprobs_N.tobytes()
    assert (got.token_ids_N.dtype, got.logprobs_N.dtype) == (np.int32, np.float32)
    assert (got.finish_reason, got.version_spans) == (expected.finish_reason, expected.version_spans)
    assert len(packed) < len(body) / 3


async def test_clients_that_do_not_accept_arrays_get_json() -> None:
    body, spans = recorded("0.32", "stop")
    for headers in ([], [(b"accept", b"application/json")]):
        assert (await through_middleware([body], headers=headers, spans=spans))[2] == body
    assert (await through_middleware([body], spans=spans, path="/v1/completions"))[2] == body


async def test_errors_and_unreadable_answers_pass_through() -> None:
    error, _ = recorded("0.32", "server_error")
    assert (await through_middleware([error], status=500))[::2] == (500, error)
    status, headers, body = await through_middleware([b'{"choices"', b": []}"])
    assert (status, headers[b"content-type"], body) == (200, b"application/json", b'{"choices": []}')


@given(st.binary(max_size=60))
def test_bytes_that_are_not_a_binary_response_are_refused(data: bytes) -> None:
    with pytest.raises(InfrastructureError, match=r"not a binary response|NaN logprobs"):
        wire.unpack_answer(data)


def test_an_unpacked_answer_outlives_its_receive_buffer() -> None:
    labelled = wire.LabelledAnswer(
        np.array([7, 8], np.int32), np.array([-0.5, -1.5], np.float32), "stop", [("default", 0)]
    )
    buffer = bytearray(wire.pack_answer(labelled))
    answer = wire.unpack_answer(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert answer.token_ids_N.tolist() == [7, 8]
    assert answer.logprobs_N.tolist() == [-0.5, -1.5]
    assert answer.label_starts == [("default", 0)]


# --- past vLLM's JSON -----------------------------------------------------------------------------------------------


class Engine:
    """A vLLM engine that gives one answer, in one piece or with what it had before."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs
        self.closed = False

    async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        try:
            for output in self.outputs:
                yield output
        finally:
            self.closed = True


def engine_output(
    ids: list[int], logprobs: list[float] | None, *, finished: bool = True, routes: np.ndarray | None = None
) -> Any:
    entries = (
        None if logprobs is None else [{i: SimpleNamespace(logprob=p)} for i, p in zip(ids, logprobs, strict=False)]
    )
    reason = "stop" if finished else None
    answer = SimpleNamespace(token_ids=ids, logprobs=entries, finish_reason=reason, routed_experts=routes)
    return SimpleNamespace(finished=finished, outputs=[answer])


async def from_engine(engine: Engine, *, output_kind: int = wire.FINAL_ONLY, headers: list[Any] = ACCEPT) -> bytes:
    """The body of an answer that a vLLM of this engine writes."""
    app = SimpleNamespace(state=SimpleNamespace(serving_tokens=SimpleNamespace(engine_client=engine)))

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        params = SimpleNamespace(output_kind=SimpleNamespace(value=output_kind))
        last = None
        async for output in app.state.serving_tokens.engine_client.generate([1], params, "r"):
            last = output.outputs[0]
        entries = [{"logprob": entry.logprob} for at in last.logprobs or () for entry in at.values()]
        content = {"content": entries}
        span = [{"version": "7", "start": 0, "end": 1}]
        choice = {"token_ids": last.token_ids, "logprobs": content, "finish_reason": "stop", "weight_versions": span}
        await respond(send, json.dumps({"choices": [choice]}).encode())

    return (await send_request(BinaryResponseMiddleware(vllm), wire.GENERATE_ROUTE, headers=headers, app=app)).body


@given(st.lists(st.tuples(st.integers(0, 150_000), st.floats(-30, 0, width=32)), max_size=40))
async def test_ids_and_logprobs_bypass_the_json_bit_for_bit(sampled: list[tuple[int, float]]) -> None:
    ids, logprobs = [i for i, _ in sampled], [p for _, p in sampled]
    engine = Engine(engine_output(ids, logprobs))
    answer = wire.unpack_answer(await from_engine(engine))
    assert answer.token_ids_N.tolist() == ids
    assert answer.logprobs_N.tolist() == logprobs
    assert (answer.finish_reason, answer.label_starts) == ("stop", [("7", 0)])
    assert engine.closed


async def test_vllm_writes_no_json_tokens_for_binary_responses() -> None:
    output = engine_output([4, 5], [-1.0, -2.0])
    await from_engine(Engine(output))
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == ([], [])


async def test_a_json_client_gets_tokens_after_a_binary_client() -> None:
    engine = Engine(engine_output([4, 5], [-1.0, -2.0]))
    body = json.loads(await from_engine(engine, headers=[]))
    assert body["choices"][0]["token_ids"] == [4, 5]


@pytest.mark.parametrize("kind", [0, 1])
async def test_a_streamed_answer_is_left_to_vllm(kind: int) -> None:
    output = engine_output([4, 5], [-1.0, -2.0])
    await from_engine(Engine(engine_output([4], [-1.0], finished=False), output), output_kind=kind)
    assert output.outputs[0].token_ids == [4, 5]


async def test_an_answer_with_missing_logprobs_is_not_packed() -> None:
    body = await from_engine(Engine(engine_output([4, 5], [-1.0])))
    assert json.loads(body)["choices"][0]["token_ids"] == [4, 5], "the driver reports the error"


async def test_a_nan_logprob_is_an_error_of_the_server() -> None:
    body = await from_engine(Engine(engine_output([4], [float("nan")])))
    with pytest.raises(InfrastructureError, match="NaN logprobs"):
        wire.unpack_answer(body)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
async def test_routes_of_tokens_bypass_the_json_and_are_read_from_it_too(dtype: Any) -> None:
    routes = (np.arange(5 * 3 * 2).reshape(5, 3, 2) * 7).astype(dtype)  # five tokens, three layers, two experts
    output = engine_output([4, 5], [-1.0, -2.0], routes=routes)
    answer = wire.resolve_versions(wire.unpack_answer(await from_engine(Engine(output))))
    np.testing.assert_array_equal(answer.routes_MXK, routes)
    assert (answer.routes_MXK.dtype, answer.token_ids_N.tolist()) == (dtype, [4, 5])
    assert output.outputs[0].routed_experts is None, "vLLM would encode them"
    file = io.BytesIO()
    np.save(file, routes)
    choice = {"token_ids": [], "finish_reason": "stop", "routed_experts": base64.b64encode(file.getvalue()).decode()}
    read = wire.read_generate(json.dumps({"choices": [choice]}).encode())
    np.testing.assert_array_equal(read.routes_MXK, routes)


@pytest.mark.parametrize("text", ["not base64", "AAAA", base64.b64encode(b"\x93NUMPY").decode()])
def test_unreadable_routes_are_a_failure_of_the_server(text: str) -> None:
    choice = {"token_ids": [], "finish_reason": "stop", "routed_experts": text}
    with pytest.raises(InfrastructureError, match="routed experts are unreadable"):
        wire.read_generate(json.dumps({"choices": [choice]}).encode())
