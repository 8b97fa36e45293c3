"""Request traces recorded from vLLM 0.32, through a real receiver."""

import http.client
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from telescope.inference.base import RequestId, TraceTarget, parse_request_id
from telescope.inference.request_tracing import TraceReceiver, request_rows, trace_environment, why_not_available

MESSAGE = (Path(__file__).parent / "traces" / "0.32.pb").read_bytes()
TIMES = {
    "gen_ai.latency.e2e": 10.0, "gen_ai.latency.time_in_queue": 0.5, "gen_ai.latency.time_in_model_prefill": 2.0,
    "gen_ai.latency.time_in_model_decode": 7.0, "gen_ai.latency.time_to_first_token": 3.25,
}  # fmt: skip


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def receiver(rows: list[dict[str, Any]]) -> Iterator[TraceReceiver]:
    made = TraceReceiver("127.0.0.1", 0, "a-secret", rows.append)
    yield made
    made.stop()


def send(receiver: TraceReceiver, body: bytes, authorization: str | None = None, path: str | None = None) -> int:
    target = receiver.target
    headers = dict(pair.split("=") for pair in [trace_environment(target, 0)["OTEL_EXPORTER_OTLP_TRACES_HEADERS"]])
    connection = http.client.HTTPConnection(urlsplit(target.url).netloc, timeout=30)
    try:
        given = {"authorization": authorization if authorization is not None else unquote(headers["authorization"])}
        connection.request("POST", path or urlsplit(target.url).path, body, given)
        return connection.getresponse().status
    finally:
        connection.close()


def test_traces_reach_the_driver_behind_a_proxy(monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "intern")
    monkeypatch.delenv("NO_PROXY", raising=False)
    environment = trace_environment(TraceTarget("http://10.0.0.7:4318/v1/traces", "a-secret"), 0)
    assert environment["no_proxy"] == environment["NO_PROXY"] == "intern,10.0.0.7"


def test_a_request_is_queue_prefill_and_decode_end_to_end():
    name = str(RequestId("5-0", turn=2, attempt=1, slot=7))
    queue, prefill, decode = request_rows(100.0, TIMES | {"gen_ai.request.id": f"generate-tokens-{name}"}, server=3)
    assert [(row["name"], row["start"], row["end"]) for row in (queue, prefill, decode)] == [
        ("queue", 100.0, 101.0), ("prefill", 101.0, 103.0), ("decode", 103.0, 110.0),
    ]  # fmt: skip
    for row in (queue, prefill, decode):
        assert (row["server"], row["sample_id"], row["component"]) == (3, "5-0", "inference")
        assert (row["attributes"]["turn"], row["attributes"]["lane"]) == ("2", "7")
    assert queue["attributes"]["scheduler_seconds"] == "0.500000"
    assert prefill["attributes"]["first_token_seconds"] == "3.250000"


@pytest.mark.parametrize("text", ["", "probe-123", "a.b.c@d", "5-0.0.0", "generate"])
def test_foreign_request_ids_name_no_sample_and_clock_skew_gives_no_negative_interval(text):
    made = RequestId("eval.countdown.12-3", turn=11, attempt=2, slot=255)
    assert (parse_request_id(str(made)), parse_request_id(text)) == (made, None)
    rows = list(request_rows(100.0, TIMES | {"gen_ai.latency.e2e": 1.0, "gen_ai.request.id": text}, server=0))
    assert [row["sample_id"] for row in rows] == [None] * 3
    assert all(100.0 <= row["start"] <= row["end"] <= 101.0 for row in rows)


def test_what_vllm_sends_becomes_spans(receiver, rows):
    assert why_not_available() is None
    assert send(receiver, MESSAGE) == 200
    assert len(rows) == 9
    assert {row["server"] for row in rows} == {3}
    assert {row["name"] for row in rows} == {"queue", "prefill", "decode"}
    assert all(1.7e9 < row["start"] <= row["end"] < row["start"] + 20 for row in rows)
    assert {row["attributes"]["tokens"] for row in rows if row["name"] == "decode"} <= {"7", "10", "20"}


def test_traces_without_the_secret_are_refused(receiver, rows):
    assert [send(receiver, MESSAGE, authorization=given) for given in ("", "Bearer wrong")] == [401, 401]
    assert send(receiver, MESSAGE, path="/v1/metrics") == 404
    assert rows == []
    assert "a-secret" not in receiver.target.url


def test_unreadable_traces_cost_one_warning(receiver, rows, caplog):
    with caplog.at_level(logging.WARNING):
        assert [send(receiver, b"\xff not a message") for _ in range(3)] == [200] * 3
    assert len(caplog.records) == 1
    assert send(receiver, MESSAGE) == 200
    assert len(rows) == 9


def test_a_port_in_use_is_replaced_by_a_free_one():
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        receiver = TraceReceiver("127.0.0.1", port, "s", lambda row: None)
        assert urlsplit(receiver.target.url).port != port
        receiver.stop()
