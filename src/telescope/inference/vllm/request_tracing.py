"""vLLM's traces of requests: a small OTLP receiver, and the spans that it makes of them.

    vLLM --a batch of traces a second, OTLP over HTTP--> TraceReceiver (threads of the driver) --> spans

Owns the receiver and what is read of a trace. vLLM traces a request as one span when it has ended, with durations in
its attributes; they become intervals that lie end to end. It does not trace requests that were aborted. Invariants: the
receiver asks for the run's secret, as the servers do; a trace that cannot be read costs a warning, said once; no
request waits for its trace.
"""

from __future__ import annotations

import hmac
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

from telescope.inference.vllm.adapter import REQUEST_ID_PREFIX
from telescope.rollout.types import parse_request_id

logger = logging.getLogger(__name__)

ROUTE = "/v1/traces"
SERVER_ATTRIBUTE = "telescope.server"
"""Attribute by which a server says which one it is."""

REQUEST_SPAN = "llm_request"
"""What vLLM calls the span of a request; it sends others about its start."""

MAX_BODY_BYTES = 64 * 2**20
EXPORT_EVERY_MS = 1000
EXPORT_QUEUE_SIZE = 16_384
"""How often a server sends its traces, and how many may wait until then; vLLM drops what is more."""

PACKAGES = (
    "opentelemetry.sdk",
    "opentelemetry.proto",
    "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry.exporter.otlp.proto.grpc",
    "grpc",
)
"""What the two ends need. They come with vLLM, which refuses to start with tracing where one is missing, gRPC's too."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TraceTarget:
    """Where a server sends its traces, and the secret that it sends along."""

    url: str
    secret: str

    def environment(self, server: int) -> dict[str, str]:
        """The environment that OpenTelemetry reads in the process of this server. Its secret is in no command line."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization={quote(f'Bearer {self.secret}')}",
            "OTEL_RESOURCE_ATTRIBUTES": f"{SERVER_ATTRIBUTE}={server}",
            "OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_EVERY_MS),
            "OTEL_BSP_MAX_QUEUE_SIZE": str(EXPORT_QUEUE_SIZE),
        }


def why_not_available() -> str | None:
    """What is missing for traces on this machine; None when nothing is."""
    for package in PACKAGES:
        try:
            found = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:  # a parent is missing too
            found = False
        if not found:
            return f"{package} is not installed"
    return None


class TraceReceiver:
    """Listens on `host`:`port` from `start` to `stop`, and gives `write` a row of the table `spans` at a time.

    When the port is taken it listens on a free one, since two runs may share a machine.
    """

    def __init__(self, host: str, port: int, secret: str, write: Callable[[Row], None]) -> None:
        self._write = write
        self._expected = f"Bearer {secret}".encode()
        self._secret = secret
        self._has_warned = False
        try:
            self._server = ThreadingHTTPServer((host, port), self._handler())
        except OSError as error:
            logger.info("otlp_receiver_port %d is not free (%s); traces are received on another", port, error.strerror)
            self._server = ThreadingHTTPServer((host, 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="telescope-traces", daemon=True)

    @property
    def target(self) -> TraceTarget:
        """What the servers must be told."""
        host, port = self._server.server_address[:2]
        return TraceTarget(f"http://{host!s}:{port}{ROUTE}", self._secret)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop listening. Traces that servers have not sent are lost."""
        self._server.shutdown()
        self._server.server_close()

    def receive(self, body: bytes) -> None:
        """Write the spans of one message. One that cannot be read is a warning."""
        try:
            for row in read_traces(body):
                self._write(row)
        except Exception as error:  # whatever an engine sends, a run does not end for want of a trace
            if not self._has_warned:
                self._has_warned = True
                logger.warning("Traces of requests cannot be read (%r); it is tried with the next, silently", error)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_POST(self) -> None:
                given = self.headers.get("Authorization", "").encode("utf-8", "replace")
                length = self.headers.get("Content-Length", "")
                if not hmac.compare_digest(given, receiver._expected):
                    self._answer(401)
                elif self.path != ROUTE:
                    self._answer(404)
                elif not length.isdigit() or int(length) > MAX_BODY_BYTES:
                    self._answer(413)
                else:
                    receiver.receive(self.rfile.read(int(length)))
                    self._answer(200)

            def _answer(self, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                if status != 200:  # its body has not been read
                    self.send_header("Connection", "close")
                    self.close_connection = True
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """No line per message."""

        return Handler


def read_traces(body: bytes) -> Iterator[Row]:
    """Rows of `spans` of the requests in one OTLP message. Raises `DecodeError` for bytes that are none."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        server = next(a.value.string_value for a in resource.resource.attributes if a.key == SERVER_ATTRIBUTE)
        for scope in resource.scope_spans:
            for span in scope.spans:
                if span.name == REQUEST_SPAN:
                    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
                    yield from request_rows(span.start_time_unix_nano / 1e9, values, int(server))


def request_rows(arrived_at: float, values: dict[str, Any], server: int) -> Iterator[Row]:
    """`queue`, `prefill` and `decode` of one request, which lie end to end from its arrival to its end.

    What vLLM calls the queue is the scheduler's alone; here it is all the time before the engine began to work on the
    request, and vLLM's own number is an attribute.
    """
    request_id = str(values.get("gen_ai.request.id", "")).removeprefix(REQUEST_ID_PREFIX)
    known = parse_request_id(request_id)
    place = {"turn": str(known.turn), "lane": str(known.lane)} if known is not None else {"request": request_id}

    def seconds(name: str) -> float:
        return max(float(values.get(f"gen_ai.latency.{name}", 0.0)), 0.0)

    ended_at = arrived_at + seconds("e2e")
    decode_at = max(ended_at - seconds("time_in_model_decode"), arrived_at)
    prefill_at = max(decode_at - seconds("time_in_model_prefill"), arrived_at)
    for name, start, end, attributes in (
        ("queue", arrived_at, prefill_at, {"scheduler_seconds": f"{seconds('time_in_queue'):.6f}"}),
        ("prefill", prefill_at, decode_at, {"tokens": str(values.get("gen_ai.usage.prompt_tokens", ""))}),
        ("decode", decode_at, ended_at, {"tokens": str(values.get("gen_ai.usage.completion_tokens", ""))}),
    ):
        yield {
            "name": name,
            "component": "inference",
            "server": server,
            "sample_id": known.sample_id if known is not None else None,
            "start": start,
            "end": end,
            "attributes": {**place, **attributes},
        }
