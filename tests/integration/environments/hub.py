"""A hub of datasets on loopback: what `datasets.load_dataset` asks of one, over a folder of files.

Serves the routes of the Hugging Face hub with which the client finds and fetches the files of a dataset. `requested`
has the paths that were fetched. `environment` points a client to it.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves `root/<owner>/<name>/...` as datasets of one revision."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.requested: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, home: Path) -> dict[str, str]:
        """Variables that make a client use this hub and nothing else, with its caches below `home`."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "HF_TOKEN": "",
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "datasets"] and len(parts) >= 4:
            self._answer_api("/".join(parts[2:4]), parts[4:], body)
        elif parts[0] == "datasets" and len(parts) >= 6 and parts[3] == "resolve":
            self._answer_file("/".join(parts[1:3]), "/".join(parts[5:]))
        else:
            self._not_found("EntryNotFound")

    def _answer_api(self, name: str, rest: list[str], body: bytes) -> None:
        folder = self.server.root / name
        if not folder.is_dir():
            self._not_found("RepoNotFound")
            return
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        if not rest or rest[0] == "revision":
            siblings = [{"rfilename": file} for file in files]
            self._answer_json({"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
        elif rest[0] == "tree":
            place = folder / "/".join(rest[2:])
            if not place.is_dir():
                self._not_found("EntryNotFound")
                return
            inside = place.rglob("*") if "recursive=true" in self.path.lower() else place.iterdir()
            self._answer_json([self._entry(folder, path) for path in sorted(inside)])
        elif rest[0] == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else []
            self._answer_json([self._entry(folder, folder / file) for file in files if file in wanted])
        else:
            self._not_found("EntryNotFound")

    @staticmethod
    def _entry(folder: Path, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(folder))
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": COMMIT}
        content = path.read_bytes()
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _answer_json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer_file(self, name: str, file: str) -> None:
        path = self.server.root / name / file
        if not path.is_file():
            self._not_found("EntryNotFound")
            return
        if self.command == "GET":
            self.server.requested.append(f"{name}/{file}")
        content = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self._answer(200, content, headers)

    def _not_found(self, code: str) -> None:
        self._answer(404, b"", {"X-Error-Code": code})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """A hub over `root`, for as long as the block runs."""
    hub = Hub(root)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join(10)
