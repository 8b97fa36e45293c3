"""Answers as arrays: the same tokens, logprobs and versions as in vLLM's JSON, and JSON wherever that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.errors import InfrastructureError
from telescope.inference import vllm_adapter as wire
from telescope.inference.packed_answers import PackedAnswersMiddleware

ANSWERS = Path(__file__).parent / "answers"
ACCEPT = [(b"accept", f"{wire.PACKED_TYPE}, application/json".encode())]


def recorded(version: str, name: str) -> tuple[bytes, str | None]:
    answer = json.loads((ANSWERS / version / f"{name}.json").read_text())
    return json.dumps(answer["body"]).encode(), answer["spans_header"]


async def through_middleware(
    parts: list[bytes], *, status: int = 200, headers: list[Any] = ACCEPT, spans: str | None = None, path: str = ""
) -> tuple[int, dict[bytes, bytes], bytes]:
    """What a caller with `headers` gets where vLLM answers with `parts`."""
    sent: list[Any] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        own = [(b"Content-Type", b"application/json"), (b"content-length", str(len(b"".join(parts))).encode())]
        if spans is not None:
            own.append((wire.VERSION_SPANS_HEADER.encode(), spans.encode()))
        await send({"type": "http.response.start", "status": status, "headers": own})
        for number, part in enumerate(parts, 1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path or wire.GENERATE_ROUTE, "headers": headers}
    await PackedAnswersMiddleware(vllm)(scope, None, send)  # type: ignore[arg-type]
    start, *bodies = sent
    got = {name.lower(): value for name, value in start["headers"]}
    return start["status"], got, b"".join(body.get("body", b"") for body in bodies)


@pytest.mark.parametrize("version", ["0.26", "0.32"])
@pytest.mark.parametrize("name", ["stop", "length", "abort", "two_versions"])
@pytest.mark.parametrize("cut", [10**9, 17])
async def test_recorded_answers_arrive_as_they_were(version: str, name: str, cut: int) -> None:
    body, spans = recorded(version, name)
    parts = [body[i : i + cut] for i in range(0, len(body), cut)]
    status, headers, packed = await through_middleware(parts, spans=spans)
    assert (status, headers[b"content-type"]) == (200, wire.PACKED_TYPE.encode())
    assert headers[b"content-length"] == str(len(packed)).encode()
    expected = wire.parse_generate(body, spans_header=spans, initial_version=6)
    got = wire.resolve_versions(wire.unpack_answer(packed), initial_version=6)
    assert got.token_ids_N.tolist() == expected.token_ids_N.tolist()
    assert got.logprobs_N.tobytes() == expected.logprobs_N.tobytes()
    assert (got.token_ids_N.dtype, got.logprobs_N.dtype) == (np.int32, np.float32)
    assert (got.finish_reason, got.version_spans) == (expected.finish_reason, expected.version_spans)
    assert len(packed) < len(body) / 3


async def test_callers_who_do_not_ask_get_json() -> None:
    body, spans = recorded("0.32", "stop")
    for headers in ([], [(b"accept", b"application/json")]):
        assert (await through_middleware([body], headers=headers, spans=spans))[2] == body
    assert (await through_middleware([body], spans=spans, path="/v1/completions"))[2] == body


async def test_errors_and_answers_that_cannot_be_read_pass_through() -> None:
    error, _ = recorded("0.32", "server_error")
    assert (await through_middleware([error], status=500))[::2] == (500, error)
    status, headers, body = await through_middleware([b'{"choices"', b": []}"])
    assert (status, headers[b"content-type"], body) == (200, b"application/json", b'{"choices": []}')


@given(st.binary(max_size=60))
def test_bytes_that_are_no_packed_answer_are_refused(data: bytes) -> None:
    with pytest.raises(InfrastructureError, match=r"no packed generation|not numbers"):
        wire.unpack_answer(data)


def test_an_unpacked_answer_outlives_the_buffer_that_it_came_in() -> None:
    labelled = wire.LabelledAnswer(
        np.array([7, 8], np.int32), np.array([-0.5, -1.5], np.float32), "stop", [("default", 0)]
    )
    buffer = bytearray(wire.pack_answer(labelled))
    answer = wire.unpack_answer(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert answer.token_ids_N.tolist() == [7, 8]
    assert answer.logprobs_N.tolist() == [-0.5, -1.5]
    assert answer.label_starts == [("default", 0)]


def test_logprobs_that_are_no_numbers_are_a_failure_of_the_server() -> None:
    broken = wire.LabelledAnswer(np.array([7, 8], np.int32), np.array([-0.5, np.nan], np.float32), "stop", [])
    with pytest.raises(InfrastructureError, match="not numbers"):
        wire.unpack_answer(wire.pack_answer(broken))
