"""A stand-in of W&B's server: what the real client calls to log a run, upload its files, list runs and download files.

Keeps everything in memory. Answers GraphQL by the name of the operation, with all fields that the client may ask for.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

ENTITY = "someone"
KEY = "0123456789" * 4
"""The API key that the server accepts."""


@dataclass
class StoredRun:
    """A run on the server."""

    name: str
    display_name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    state: str = "running"
    created_at: float = field(default_factory=time.time)
    heartbeat_at: float = field(default_factory=time.time)
    history: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    artifacts: dict[str, list[str]] = field(default_factory=dict)
    """Names of artifacts, and the paths in their manifests."""

    def node(self) -> dict[str, Any]:
        """Returns the fields of GraphQL's type Run."""
        config = {name: {"value": value} for name, value in self.config.items()}
        return {
            "id": f"id-{self.name}", "name": self.name, "displayName": self.display_name or self.name,
            "projectId": "1", "state": self.state, "tags": self.tags, "config": json.dumps(config),
            "summaryMetrics": json.dumps(self.summary), "systemMetrics": "{}", "createdAt": _iso(self.created_at),
            "heartbeatAt": _iso(self.heartbeat_at), "historyLineCount": len(self.history), "readOnly": False,
            "user": {"name": ENTITY, "username": ENTITY},
            **dict.fromkeys(("sweepName", "group", "jobType", "commit", "description", "notes", "historyKeys")),
        }  # fmt: skip


class FakeWandb:
    """The server. Use it as a context manager; `url` is what WANDB_BASE_URL names."""

    def __init__(self) -> None:
        self.projects: dict[str, dict[str, StoredRun]] = {}
        """Runs by name, by project."""
        self.requests: list[tuple[str, str]] = []
        """Operation and variables, or method and path, of each request."""
        self.is_down = False
        """Whether connections are closed without an answer."""
        self.refuses: str | None = None
        """Message with which every question about a project is refused, as without permission."""
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.wandb = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> FakeWandb:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that make the client use this server."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY, "WANDB_ENTITY": ENTITY}

    def add_run(self, project: str, run: StoredRun) -> StoredRun:
        """Adds a run, as if it had been logged."""
        self.projects.setdefault(project, {})[run.name] = run
        return run

    def run(self, project: str, name: str) -> StoredRun:
        """Returns a run."""
        return self.projects[project][name]

    def operations(self, name: str) -> list[dict[str, Any]]:
        """Returns the variables of each GraphQL operation of this name."""
        return [json.loads(variables) for operation, variables in list(self.requests) if operation == name]

    def puts(self) -> list[str]:
        """Returns the names of uploaded files, in order."""
        stored = [path.split("/", 4) for method, path in list(self.requests) if method == "PUT"]
        return [parts[4] for parts in stored if parts[1] == "storage"]

    # GraphQL, by the name of the operation.

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Returns the data of an operation. Raises `PermissionError`."""
        self.requests.append((operation, json.dumps(variables)))
        handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "RunResumeStatus": self._resume_status, "UpsertBucket": self._upsert, "CreateRunFiles": self._create_files,
            "GetProjects": self._projects, "Runs": self._runs, "Run": self._run, "RunFiles": self._run_files,
            "deleteFiles": self._delete_files, "ArtifactType": lambda variables: {"project": {"artifact": None}},
            "CreateArtifact": self._create_artifact, "CreateArtifactManifest": self._create_manifest,
            "CreateArtifactFiles": self._create_artifact_files,
            "CommitArtifact": lambda variables: {"commitArtifact": {"artifact": {"id": "a", "digest": "d"}}},
        }  # fmt: skip
        if operation in ("Runs", "Run", "RunFiles") and self.refuses is not None:
            raise PermissionError(self.refuses)
        if operation in handlers:
            return handlers[operation](variables)
        viewer = {"id": "u", "entity": ENTITY, "username": ENTITY, "email": "", "flags": "{}"}
        return {"viewer": {**viewer, "teams": {"edges": []}}, "serverInfo": None, "entity": None}

    def _resume_status(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.projects.get(variables["project"], {}).get(variables["name"])
        bucket = None
        if run is not None:
            lines = {"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "wandbConfig": '{"t":1}'}
            tail = json.dumps([json.dumps(row) for row in run.history[-1:]])
            bucket = run.node() | lines | {"historyTail": tail}
        return {"model": {"id": "p", "name": variables["project"], "entity": _ENTITY, "bucket": bucket}}

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        project, name = variables["project"], variables["name"]
        runs = self.projects.setdefault(project, {})
        inserted = name not in runs
        run = runs.setdefault(name, StoredRun(name))
        run.display_name = variables.get("displayName") or run.display_name
        run.tags = variables.get("tags") or run.tags
        run.heartbeat_at, run.state = time.time(), "running"
        sent = json.loads(variables.get("config") or "{}")
        run.config |= {key: value["value"] for key, value in sent.items() if "value" in value}
        bucket = run.node() | {"project": {"id": "p", "name": project, "entity": _ENTITY}}
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _create_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        place = f"{self.url}/storage/{variables['project']}/{variables['run']}"
        files = [{"name": name, "uploadUrl": f"{place}/{quote(name)}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}

    def _runs(self, variables: dict[str, Any]) -> dict[str, Any]:
        if variables["project"] not in self.projects or variables["entity"] != ENTITY:
            return {"project": None}
        runs = list(self.projects[variables["project"]].values())
        runs.sort(key=lambda run: run.created_at, reverse=str(variables["order"]).startswith("-"))
        wanted = json.loads(variables.get("filters") or "{}")
        found = [run for run in runs if _matches(run, wanted)]
        page, info = _page(found, variables.get("cursor"), variables["perPage"])
        edges = [{"node": run.node(), "cursor": str(place)} for place, run in page]
        listed = {"edges": edges, "pageInfo": info}
        return {"project": {"internalId": "1", "runCount": len(found), "readOnly": False, "runs": listed}}

    def _projects(self, variables: dict[str, Any]) -> dict[str, Any]:
        known = {"__typename": "Project", "entityName": ENTITY, "createdAt": _iso(0), "isBenchmark": False}
        edges = [{"node": {"id": name, "name": name, "user": None, **known}} for name in self.projects]
        return {"models": {"pageInfo": {"endCursor": None, "hasNextPage": False}, "edges": edges}}

    def _run(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.projects.get(variables["project"], {}).get(variables["name"])
        return {"project": {"run": run.node() if run else None}}

    def _run_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        project, name = variables["project"], variables["name"]
        run = self.projects[project][name]
        prefix = (variables.get("pattern") or "%").removesuffix("%")
        named = variables.get("fileNames") or run.files
        found = [item for item in sorted(run.files.items()) if item[0].startswith(prefix) and item[0] in named]
        page, info = _page(found, variables.get("fileCursor"), variables["fileLimit"])
        edges = []
        for place, (file, content) in page:
            url = f"{self.url}/storage/{project}/{name}/{quote(file)}"
            md5 = base64.b64encode(hashlib.md5(content).digest()).decode()
            node = {"id": f"{project}/{name}/{file}", "name": file, "url": url, "directUrl": url, "md5": md5}
            edges.append(
                {
                    "node": {**node, "sizeBytes": len(content), "mimetype": "", "updatedAt": _iso(time.time())},
                    "cursor": str(place),
                }
            )
        listed = {"edges": edges, "pageInfo": info}
        return {"project": {"internalId": "1", "run": {"fileCount": len(found), "files": listed}}}

    def _delete_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        for project, run, file in (each.split("/", 2) for each in variables["files"]):
            del self.projects[project][run].files[file]
        return {"deleteFiles": {"success": True}}

    def _create_artifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        value = variables["input"]
        name = value["artifactCollectionName"]
        self.projects[value["projectName"]][value["runName"]].artifacts[name] = []
        artifact = {"id": f"{value['projectName']}/{value['runName']}/{name}", "state": "PENDING"}
        latest = {"latestArtifact": None}
        return {"createArtifact": {"artifact": {**artifact, "artifactSequence": {"id": "s", **latest}}}}

    def _create_manifest(self, variables: dict[str, Any]) -> dict[str, Any]:
        artifact = variables["artifactID"]
        url = f"{self.url}/manifest/{quote(artifact)}"
        file = {"id": "f", "name": variables["name"], "displayName": "m", "uploadUrl": url, "uploadHeaders": []}
        return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": file}}}

    def _create_artifact_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        edges = []
        for number, spec in enumerate(variables["input"]["artifactFiles"]):
            uploaded = {"storagePath": f"p{number}", "uploadUrl": f"{self.url}/blob/{number}", "uploadHeaders": []}
            artifact = {"id": spec["artifactID"]}
            node = {"id": str(number), "name": spec["name"], "displayName": spec["name"], "artifact": artifact}
            edges.append({"node": {**node, **uploaded, "uploadMultipartUrls": None}})
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    # Files and history.

    def put(self, path: str, content: bytes) -> None:
        """Stores an uploaded file."""
        self.requests.append(("PUT", path))
        kind, _, rest = path.lstrip("/").partition("/")
        if kind == "manifest":
            project, run, artifact = unquote(rest).split("/")
            self.projects[project][run].artifacts[artifact] = sorted(json.loads(content)["contents"])
        elif kind == "storage":
            project, run, file = unquote(rest).split("/", 2)
            self.projects[project][run].files[file] = content

    def get(self, path: str) -> bytes | None:
        """Returns an uploaded file."""
        self.requests.append(("GET", path))
        kind, _, rest = path.lstrip("/").partition("/")
        if kind != "storage":
            return None
        project, run, file = unquote(rest).split("/", 2)
        return self.projects[project][run].files.get(file)

    def stream(self, path: str, body: dict[str, Any]) -> None:
        """Stores history and summary, which the client streams."""
        _, _, project, name, _ = path.strip("/").split("/")
        run = self.projects[project][name]
        files = body.get("files") or {}
        run.history += [json.loads(line) for line in files.get("wandb-history.jsonl", {}).get("content", ())]
        for line in files.get("wandb-summary.json", {}).get("content", ()):
            run.summary = json.loads(line)
        run.heartbeat_at = time.time()
        if body.get("complete"):
            run.state = "finished" if body.get("exitcode") == 0 else "failed"


_ENTITY = {"id": "e", "name": ENTITY}


def _iso(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _page(found: list[Any], cursor: str | None, size: int) -> tuple[list[tuple[int, Any]], dict[str, Any]]:
    first = int(cursor) + 1 if cursor else 0
    end = first + size
    return list(enumerate(found))[first:end], {"endCursor": str(end - 1), "hasNextPage": end < len(found)}


def _matches(run: StoredRun, wanted: dict[str, Any]) -> bool:
    """Returns whether a run matches a filter in the form of MongoDB's."""
    values: dict[str, Any] = {"name": run.name, "state": run.state, "createdAt": _iso(run.created_at)}
    values |= {f"config.{name}.value": value for name, value in run.config.items()}
    for key, value in wanted.items():
        if key == "$or":
            if not any(_matches(run, each) for each in value):
                return False
        elif key == "tags":
            if value not in run.tags:
                return False
        elif isinstance(value, dict):
            if "$exists" in value and (key in values) != value["$exists"]:
                return False
            if "$in" in value and values[key] not in value["$in"]:
                return False
            if "$gt" in value and not values[key] > value["$gt"]:
                return False
        elif values[key] != value:
            return False
    return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    wandb: FakeWandb

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leaves out that clients close connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *arguments: Any) -> None:
        """Prints nothing."""

    def parse_request(self) -> bool:
        """Closes the connection of a server that is down."""
        if self.server.wandb.is_down:
            self.close_connection = True
            return False
        return super().parse_request()

    def do_GET(self) -> None:
        content = self.server.wandb.get(urlsplit(self.path).path)
        self._reply(404 if content is None else 200, content or b"")

    def do_PUT(self) -> None:
        self.server.wandb.put(urlsplit(self.path).path, self._body())
        self._reply(200, b"{}")

    def do_POST(self) -> None:
        body = self._body()
        if self.path.startswith("/sdk/"):  # the client's own telemetry
            self._reply(200, b"")
        elif not self._is_allowed():
            self._reply(401, b'{"errors": [{"message": "the API key is not valid"}]}')
        elif self.path == "/graphql":
            self._answer(json.loads(body))
        else:
            self.server.wandb.stream(self.path, json.loads(body))
            self._reply(200, b'{"limits": {}}')

    def _answer(self, question: dict[str, Any]) -> None:
        words = question["query"].replace("#graphql", "").replace("(", " ").split()
        try:
            data = self.server.wandb.answer(words[1].strip("{"), question.get("variables") or {})
            self._reply(200, json.dumps({"data": data}).encode())
        except PermissionError as error:
            self._reply(403, json.dumps({"errors": [{"message": str(error)}]}).encode())

    def _is_allowed(self) -> bool:
        _, _, credentials = self.headers.get("Authorization", "").partition(" ")
        return base64.b64decode(credentials).decode().partition(":")[2] == KEY

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
