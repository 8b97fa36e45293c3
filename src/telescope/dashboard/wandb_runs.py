"""Reads the runs of a W&B project and their records back, through W&B's own client.

Owns the requests to the server and the meaning of their failures. Does not own the places of copies or their updates
(`telescope.dashboard.remote`). Needs the package `wandb`.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from telescope.errors import UserError
from telescope.trackers.wandb import DEFAULT_HOSTS, VERSION_KEY, has_credentials, server_hosts
from telescope.trackers.wandb_files import FOLDER, MANIFEST, kind_of
from telescope.utils.packages import is_installed

ANSWER_SECONDS = 20
"""Deadline of a request, in seconds."""

TRANSFER_SECONDS = 600
"""Deadline of a file's download, in seconds."""

RETRIES = 2
"""How often the client retries. Few, because a person waits, and a live run is polled again anyway."""

PAGE_SIZE = 500

OURS = {"$or": [{"tags": "telescope"}, {f"config.{VERSION_KEY}.value": {"$exists": True}}]}
"""Matches runs with Telescope's default tag or with its mark in the config."""

_TOP_LEVEL = ("config.yaml", "run.json", "heartbeat.json", "summary.json")
_FOLDERS = ("tables", "code", "logs")
_UNREACHABLE = ("giving up after", "dial tcp", "timed out", "timeout", "in time", "connection", "no such host", "EOF")


class WandbError(UserError):
    """Raised if W&B cannot be reached or refuses a request."""


class UnreachableError(WandbError):
    """Raised if the server does not respond. It may respond later."""


@dataclass(frozen=True)
class RemoteRun:
    """A Telescope run in W&B's list."""

    name: str
    """The id on W&B, which is also the run id in the record."""
    display_name: str
    state: str
    """State according to W&B: `running`, `finished`, `failed`, `crashed` or `killed`."""
    created_at: float
    heartbeat_at: float | None
    project: str
    tags: list[str]
    config: dict[str, Any]
    summary: dict[str, Any]


@dataclass(frozen=True)
class RemoteFile:
    """A file of a record on W&B."""

    size: int
    version: str
    """Differs if the content does: the MD5 or, if the storage has none, size and time."""
    handle: Any = field(repr=False)


class WandbServer:
    """Sends requests for the user's projects. Raises only `WandbError`, with the fix."""

    path = "your projects"
    """The requested object, for messages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        """Receives the empty folders that W&B's client creates for each listed run."""
        self._api: Any = None

    @property
    def host(self) -> str:
        """The host of the W&B server."""
        return server_hosts(os.environ)[0]

    @property
    def _server(self) -> str:
        """The server's name in messages: W&B's own name, or another server's host."""
        return "W&B" if self.host in DEFAULT_HOSTS else self.host

    def projects(self) -> list[str]:
        """Returns the user's projects with Telescope runs, as ENTITY/PROJECT. Sends a request for each project."""
        with self._explained():
            self._api = None  # W&B's client caches its first response
            listed = self._client().projects()
            paths = [f"{listed.entity}/{project.name}" for project in listed]
            return [path for path in paths if len(self._client().runs(path, OURS, per_page=1, lazy=False))]

    def _client(self) -> Any:
        if self._api is None:
            if not is_installed("wandb"):
                raise WandbError(f"Reading {self.path} needs the package wandb. Run `pip install wandb`.")
            if not has_credentials(os.environ):
                raise WandbError(
                    f"There are no credentials for {self._server}, which has the runs of {self.path}. "
                    "Run `wandb login`, or set WANDB_API_KEY."
                )
            import wandb

            os.environ.setdefault("WANDB_DIR", str(self._folder))
            settings = wandb.Settings(
                silent=True,
                x_graphql_retry_max=RETRIES,
                x_graphql_timeout_seconds=ANSWER_SECONDS,
                x_file_transfer_retry_max=RETRIES,
                x_file_transfer_timeout_seconds=TRANSFER_SECONDS,
            )
            wandb.setup(settings=settings)
            self._api = wandb.Api(timeout=ANSWER_SECONDS)
        return self._api

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # the client raises its own errors, ValueError, and errors of its transport
            raise self._problem(error) from error

    def _problem(self, error: Exception) -> WandbError:
        text = (str(error) or repr(error)).splitlines()[0]
        if any(word.lower() in str(error).lower() for word in _UNREACHABLE):
            return UnreachableError(f"{self._server} cannot be reached: {text}.")
        if type(error).__name__ == "AuthenticationError":
            return WandbError(f"{self._server} refuses the API key: {text}. Run `wandb login --relogin`.")
        if "Could not find" in text:
            return WandbError(
                f"W&B has no project {self.path!r}, or you may not see it. Check the name, and with `wandb status` "
                "which account is logged in."
            )
        return WandbError(f"W&B does not let you read {self.path!r}: {text}")


class WandbProject(WandbServer):
    """The runs of one project."""

    def __init__(self, entity: str, project: str, folder: Path) -> None:
        super().__init__(folder)
        self.path = f"{entity}/{project}"
        self.project = project

    def runs(self, newer_than: float = 0.0, names: Iterable[str] = ()) -> tuple[list[RemoteRun], dict[str, str]]:
        """Returns the Telescope runs, newest first, and the names of other runs by id.

        With `newer_than`, returns only runs that were created later, that are running, or that are in `names`.
        """
        newer = datetime.fromtimestamp(newer_than).astimezone().isoformat()
        some = [{"state": "running"}, {"name": {"$in": list(names)}}, {"createdAt": {"$gt": newer}}]
        filters = {"$or": some} if newer_than else {}
        with self._explained():
            self._client().flush()  # W&B's client caches responses
            found = list(self._client().runs(self.path, filters, "-created_at", per_page=PAGE_SIZE, lazy=False))
        ours = [
            RemoteRun(
                name=run.id,
                display_name=run.name or run.id,
                state=run.state,
                created_at=_seconds(run.created_at) or 0.0,
                heartbeat_at=_seconds(run.heartbeat_at),
                project=self.project,
                tags=list(run.tags or ()),
                config={key: value for key, value in run.config.items() if key != VERSION_KEY},
                summary=dict(run.summary_metrics or {}),
            )
            for run in found
            if VERSION_KEY in run.config
        ]
        return ours, {run.id: run.name or run.id for run in found if VERSION_KEY not in run.config}

    def files(self, name: str) -> dict[str, RemoteFile] | None:
        """Returns the current files of a record by their paths, or None without a record."""
        with self._explained():
            listed = self._client().run(f"{self.path}/{name}").files(pattern=f"{FOLDER}/%", per_page=PAGE_SIZE)
            found = [
                (file.name, RemoteFile(file.size, file.md5 or f"{file.size} {file.updated_at}", file))
                for file in listed
            ]
        return dict(found) or None

    def read_manifest(self, files: dict[str, RemoteFile], folder: Path) -> dict[str, int]:
        """Downloads the list of current files. Returns sizes by path. Leaves out names that are not a record's."""
        self.download(files[MANIFEST], folder)
        try:
            names = json.loads((folder / MANIFEST).read_bytes())["files"]
            return {name: int(size) for name, size in names.items() if is_record_file(name)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WandbError(f"{MANIFEST} of the run is damaged: {error!r}.") from error

    def download(self, file: RemoteFile, folder: Path) -> Path:
        """Downloads a file to `folder`, below its name on W&B. Returns its path."""
        with self._explained():
            file.handle.download(root=str(folder), replace=True).close()
        return folder / file.handle.name


def is_record_file(name: Any) -> bool:
    """Returns whether a name from the server is that of a record file, and so stays below the run's folder."""
    if not isinstance(name, str) or kind_of(name) is None:
        return False
    parts = PurePosixPath(name).parts
    if name != "/".join(parts) or any(part.startswith(".") or "\\" in part or "\0" in part for part in parts):
        return False
    return name in _TOP_LEVEL or (len(parts) > 1 and parts[0] in _FOLDERS)


def _seconds(text: str | None) -> float | None:
    if not text:
        return None
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
