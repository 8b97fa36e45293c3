"""The list of a run's sandboxes in a file, so that none outlives the run.

Invariant: a sandbox is in the file before it is used, and leaves it after it is destroyed. `reap` destroys what a
killed process left: by id, and by the label that every sandbox of the run carries.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from telescope.sandbox.base import SandboxHandle, SandboxProvider

logger = logging.getLogger(__name__)

FILE_NAME = "sandboxes.jsonl"
DIRECTORY_VARIABLE = "TELESCOPE_SANDBOX_RECORD"
"""Environment variable of a rollout worker with the run directory."""


class SandboxLedger:
    """The file in a run directory. Without a directory nothing is written."""

    def __init__(self, directory: Path | None) -> None:
        self.path = None if directory is None else directory / FILE_NAME

    @classmethod
    def of_process(cls) -> SandboxLedger:
        """Returns the ledger of the run that this process works for."""
        directory = os.environ.get(DIRECTORY_VARIABLE)
        return cls(Path(directory) if directory else None)

    def opened(self, provider: SandboxProvider, handle: SandboxHandle) -> None:
        """Notes a new sandbox."""
        made_by = f"{type(provider).__module__}.{type(provider).__qualname__}"
        self._write({"id": handle.id, "provider": provider.name, "made_by": made_by, "created_at": time.time()})

    def closed(self, handle: SandboxHandle) -> None:
        """Notes that a sandbox was destroyed."""
        self._write({"id": handle.id, "destroyed": True})

    def _write(self, row: dict[str, Any]) -> None:
        if self.path is None:
            return
        with open(self.path, "ab", buffering=0) as file:  # one write of one line: processes do not mix
            file.write(json.dumps(row).encode() + b"\n")
