"""Stores JSON documents of the dashboard's user: layouts, columns, tags, and notes on runs.

Owns the folder, `telescope/dashboard` in the user's config folder, and the files in it. The pages own the contents of
documents. Nothing is written into a run.

Invariants: the name of a file is a digest of the document's name and the run's id, so no input becomes a path. A
document is replaced as a whole, and only by a writer that has read the newest version.
"""

import hashlib
import json
import re
import threading
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from telescope.errors import UserError
from telescope.record.files import read_json, replace_file
from telescope.utils.text import home_folder

MAX_BYTES = 256 * 2**10
"""Most bytes of one document. Notes on a run are a few KiB."""

MAX_DOCUMENTS = 10_000
"""Most documents of one user, so that a page in a loop does not fill the disk."""

NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")

NO_VERSION = ""
"""Version of a document that does not exist."""


class ConflictError(UserError):
    """Raised if the document has changed since the writer read it."""


class Document(BaseModel):
    """A document that the user keeps. `value` is null and `version` empty if there is none yet."""

    value: Any
    version: str


def user_folder() -> Path:
    """Returns the folder of the documents. Creates nothing."""
    return home_folder("XDG_CONFIG_HOME", ".config") / "dashboard"


class Documents:
    """Documents in a folder that the first write creates. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()

    def read(self, name: str, run_id: str = "") -> Document:
        """Returns a document of the user or of a run. Raises `UserError` for an invalid name."""
        path = self._path(name, run_id)
        try:
            kept = read_json(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}. Repair or remove it.") from error
        if not isinstance(kept, dict) or "value" not in kept:
            return Document(value=None, version=NO_VERSION)
        return Document(value=kept["value"], version=_digest(kept["value"]))

    def write(self, name: str, value: Any, version: str, run_id: str = "") -> Document:
        """Replaces the document if it has this version. A value of None removes it.

        Raises `ConflictError` if the version has changed, and `UserError` if the document is too large, there are too
        many documents, or the folder cannot be written.
        """
        path = self._path(name, run_id)
        content = json.dumps({"name": name, "run": run_id, "value": value}, indent=1).encode()
        if len(content) > MAX_BYTES:
            raise UserError(f"{name} has {len(content)} bytes; {MAX_BYTES} are allowed. Shorten it.")
        with self._lock:
            if self.read(name, run_id).version != version:
                raise ConflictError(f"{name} was changed elsewhere. Read it again.")
            try:
                if value is None:
                    path.unlink(missing_ok=True)
                    return Document(value=None, version=NO_VERSION)
                self.folder.mkdir(parents=True, exist_ok=True)
                if not path.exists() and sum(1 for _ in self.folder.iterdir()) >= MAX_DOCUMENTS:
                    raise UserError(f"{self.folder} has {MAX_DOCUMENTS} documents. Remove those of old runs.")
                replace_file(path, content)
            except OSError as error:
                raise UserError(f"{name} cannot be kept in {self.folder}: {error.strerror}.") from error
        return Document(value=value, version=_digest(value))

    def _path(self, name: str, run_id: str) -> Path:
        if not NAME.fullmatch(name):
            raise UserError(f"{name!r} is not the name of a document. Use lower-case letters, digits, - and _.")
        digest = hashlib.blake2b(f"{name}\n{run_id}".encode(), digest_size=16).hexdigest()
        return self.folder / f"{digest}.json"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
