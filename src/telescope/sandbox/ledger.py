"""Lists a run's sandboxes in a file, so that none outlives the run.

Invariant: a sandbox is added to the file before it is used, and removed after it is destroyed, unless the file cannot
be written. `reap` destroys what a killed process left, by id and by the label that every sandbox of the run carries.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from telescope.sandbox.base import PROVIDERS, SandboxHandle, SandboxProvider, get_provider

logger = logging.getLogger(__name__)

FILE_NAME = "sandboxes.jsonl"
DIRECTORY_VARIABLE = "TELESCOPE_SANDBOX_RECORD"
"""Environment variable of a rollout worker with the run directory."""


class SandboxLedger:
    """The ledger file in a run directory. Without a directory nothing is written."""

    def __init__(self, directory: Path | None) -> None:
        self.path = None if directory is None else directory / FILE_NAME
        self._last_error = ""

    @classmethod
    def of_process(cls) -> SandboxLedger:
        """Returns the ledger of this process's run."""
        directory = os.environ.get(DIRECTORY_VARIABLE)
        return cls(Path(directory) if directory else None)

    @property
    def run(self) -> str:
        """Returns the label of the run's sandboxes."""
        if self.path is None:
            return ""
        folder = self.path.parent.resolve()
        return f"{folder.name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}"

    def opened(self, provider: SandboxProvider, handle: SandboxHandle) -> None:
        """Records a new sandbox."""
        made_by = f"{type(provider).__module__}.{type(provider).__qualname__}"
        self._write({"id": handle.id, "provider": provider.name, "made_by": made_by, "created_at": time.time()})

    def closed(self, handle: SandboxHandle) -> None:
        """Records that a sandbox was destroyed."""
        self._write({"id": handle.id, "destroyed": True})

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the entries in order."""
        if self.path is not None and self.path.exists():
            for line in self.path.read_bytes().splitlines():
                with contextlib.suppress(ValueError):  # a killed process may leave half a line
                    yield json.loads(line)

    def _write(self, row: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # it may not exist on other nodes
            with open(self.path, "ab", buffering=0) as file:  # one write per line, so lines of processes do not mix
                file.write(json.dumps(row).encode() + b"\n")
        except OSError as error:  # such as a full disk, which does not end a run
            if str(error) != self._last_error:
                logger.warning("Sandboxes are not listed, and only found by their label: %s", error)
            self._last_error = str(error)


async def reap(
    directory: Path,
    providers: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    report: Callable[[str], object] = logger.warning,
) -> list[str]:
    """Destroys the sandboxes that a run left, by their ids and by the run's label.

    Searches for the label at the providers in the ledger and at `providers`, which has the arguments of their
    constructors. Returns the provider and id of each destroyed sandbox. Reports a provider that cannot be used, and a
    sandbox that cannot be destroyed.
    """
    ledger = SandboxLedger(directory)
    arguments = {PROVIDERS.get(name, name): values for name, values in providers.items()}
    left: dict[str, dict[str, SandboxHandle]] = {name: {} for name in arguments}
    owners: dict[str, str] = {}
    for row in ledger.rows():
        if row.get("destroyed"):
            left.get(owners.get(row["id"], ""), {}).pop(row["id"], None)
        else:
            owners[row["id"]] = row["made_by"]
            left.setdefault(row["made_by"], {})[row["id"]] = SandboxHandle(row["id"])
    destroyed = []
    for made_by, handles in left.items():
        with _reported(made_by, report):
            provider = get_provider(made_by, **arguments.get(made_by, {}))
            with _reported(made_by, report):
                handles |= {handle.id: handle for handle in await provider.find(ledger.run)}
            for handle in handles.values():
                with _reported(made_by, report):  # a failure does not stop the others
                    await provider.destroy(handle)
                    ledger.closed(handle)
                    destroyed.append(f"{provider.name} {handle.id}")
            await provider.close()
    return destroyed


@contextlib.contextmanager
def _reported(made_by: str, report: Callable[[str], object]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        report(f"The sandboxes of {made_by} cannot be reaped: {error}")
