"""Receives vLLM's request traces over OTLP and turns them into spans.

    vLLM --a batch of traces a second, OTLP over HTTP--> TraceReceiver (threads of the driver) --> spans

vLLM traces a request as one span when it has ended, with durations as attributes; they become consecutive intervals. It
does not trace aborted requests. Invariants: the receiver requires the run's secret, as the servers do; an unreadable
trace costs one warning; no request waits for its trace.
"""

import hmac
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, urlsplit

from telescope.config import TelescopeConfig
from telescope.inference.base import TraceTarget, parse_request_id
from telescope.inference.vllm.adapter import REQUEST_ID_PREFIX
from telescope.utils.packages import is_installed
from telescope.utils.process import without_proxy

logger = logging.getLogger(__name__)

ROUTE = "/v1/traces"
SERVER_ATTRIBUTE = "telescope.server"
"""Attribute with the index of the server."""

REQUEST_SPAN = "llm_request"
"""Name of vLLM's span of a request; it sends others about its start."""

MAX_BODY_BYTES = 64 * 2**20
EXPORT_EVERY_MS = 1000
EXPORT_QUEUE_SIZE = 16_384
"""Interval between a server's exports, and the traces that may wait until then; vLLM drops the rest."""

PACKAGES = (
    "opentelemetry.sdk.trace", "opentelemetry.proto", "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry.exporter.otlp.proto.grpc", "grpc",
)  # fmt: skip
"""Packages of both ends. They come with vLLM, which refuses to start with tracing without any one of them, gRPC
included."""

Row = dict[str, Any]


def trace_environment(target: TraceTarget, server: int) -> dict[str, str]:
    """Returns OpenTelemetry's environment for a server's process. The secret is in no command line."""
    return without_proxy(str(urlsplit(target.url).hostname)) | {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization={quote(f'Bearer {target.secret}')}",
        "OTEL_RESOURCE_ATTRIBUTES": f"{SERVER_ATTRIBUTE}={server}",
        "OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_EVERY_MS),
        "OTEL_BSP_MAX_QUEUE_SIZE": str(EXPORT_QUEUE_SIZE),
    }


def why_not_available() -> str | None:
    """Returns what is missing for traces on this machine, or None."""
    return next((f"{package} is not installed" for package in PACKAGES if not is_installed(package)), None)


@contextmanager
def receive_traces(config: TelescopeConfig, host: str, write: Callable[[Row], None]) -> Iterator[TraceTarget | None]:
    """Receives request traces inside the block. Yields None if tracing is not available here."""
    missing = why_not_available()
    if missing is not None:
        logger.warning("Requests are not traced: %s. enable_vllm_tracing: false turns this off.", missing)
        yield None
        return
    receiver = TraceReceiver(host, config.otlp_receiver_port, secrets.token_urlsafe(32), write)
    try:
        yield receiver.target
    finally:
        receiver.stop()


class TraceReceiver(ThreadingHTTPServer):
    """Listens on `host`:`port` until `stop`, and passes rows of the table `spans` to `write`.

    If the port is in use it listens on a free one, since two runs may share a machine.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, secret: str, write: Callable[[Row], None]) -> None:
        self._write = write
        self._has_warned = False
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            logger.info("otlp_receiver_port %d is in use (%s); using a free port for traces", port, error.strerror)
            super().__init__((host, 0), _Handler)
        self.target = TraceTarget(f"http://{host}:{self.server_address[1]}{ROUTE}", secret)
        threading.Thread(target=self.serve_forever, name="telescope-traces", daemon=True).start()

    def stop(self) -> None:
        """Stops listening. Traces that servers have not sent are lost."""
        self.shutdown()
        self.server_close()

    def receive(self, body: bytes) -> None:
        """Writes the spans of one message. Logs a warning for an unreadable message."""
        try:
            for row in read_traces(body):
                self._write(row)
        except Exception as error:  # an unreadable trace must not end a run
            if not self._has_warned:
                self._has_warned = True
                logger.warning("Request traces cannot be read (%r). Further failures are not logged.", error)


class _Handler(BaseHTTPRequestHandler):
    server: TraceReceiver
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self) -> None:
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        length = self.headers.get("Content-Length", "")
        status = 200
        if not hmac.compare_digest(given, f"Bearer {self.server.target.secret}".encode()):
            status = 401
        elif self.path != ROUTE:
            status = 404
        elif not length.isdigit() or int(length) > MAX_BODY_BYTES:
            status = 413
        else:
            self.server.receive(self.rfile.read(int(length)))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        if status != 200:  # its body was not read
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def read_traces(body: bytes) -> Iterator[Row]:
    """Yields rows of `spans` for the requests in one OTLP message. Raises `DecodeError` for other bytes."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        server = next(a.value.string_value for a in resource.resource.attributes if a.key == SERVER_ATTRIBUTE)
        for scope in resource.scope_spans:
            for span in scope.spans:
                if span.name == REQUEST_SPAN:
                    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
                    yield from request_rows(span.start_time_unix_nano / 1e9, values, int(server))


def request_rows(arrived_at: float, values: dict[str, Any], server: int) -> Iterator[Row]:
    """Yields consecutive `queue`, `prefill` and `decode` spans of one request.

    The attribute `first_token_seconds` of `prefill` is vLLM's time to first token, from the arrival of the request.
    vLLM's queue time is only the scheduler's. Here `queue` is all the time before the engine began to work on the
    request, and vLLM's number is an attribute.
    """
    request_id = str(values.get("gen_ai.request.id", "")).removeprefix(REQUEST_ID_PREFIX)
    known = parse_request_id(request_id)
    place = {"turn": str(known.turn), "lane": str(known.slot)} if known is not None else {"request": request_id}

    def seconds(name: str) -> float:
        return max(float(values.get(f"gen_ai.latency.{name}", 0.0)), 0.0)

    ended_at = arrived_at + seconds("e2e")
    decode_at = max(ended_at - seconds("time_in_model_decode"), arrived_at)
    prefill_at = max(decode_at - seconds("time_in_model_prefill"), arrived_at)
    prompt = {"tokens": str(values.get("gen_ai.usage.prompt_tokens", ""))}
    if "gen_ai.latency.time_to_first_token" in values:
        prompt["first_token_seconds"] = f"{seconds('time_to_first_token'):.6f}"
    for name, start, end, attributes in (
        ("queue", arrived_at, prefill_at, {"scheduler_seconds": f"{seconds('time_in_queue'):.6f}"}),
        ("prefill", prefill_at, decode_at, prompt),
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
