"""An HTTP server in a thread, with the answers that a test scripts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Logs nothing. `body` is the JSON of the request, `send_json` sends the answer."""

    protocol_version = "HTTP/1.1"

    @property
    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def send_json(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        sent = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json", "Content-Length": str(len(sent)), **(headers or {})
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, format: str, *_: Any) -> None:
        return None


@contextmanager
def serve(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serves a handler on a free port. Yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
