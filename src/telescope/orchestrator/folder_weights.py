"""Loads model folders into running engines, in place, and verifies them.

Serves standalone evals, where no trainer sends weights. Every worker reads the folder itself, with the loading code of
a weight sync, and its fingerprints are compared with the files. Owns the choice of the folder that servers should have.

Invariant: `sync_one` loads one server at a time, and never loads the same folder twice.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from telescope.config import TelescopeConfig
from telescope.errors import InfrastructureError, RunError
from telescope.inference.base import EngineBackend
from telescope.weights.model_folder import folder_metas
from telescope.weights.plan import UpdateInfo, make_update
from telescope.weights.probe import compare

logger = logging.getLogger(__name__)


@dataclass
class FolderWeights:
    """The weights that the servers should have, initially the weights that they start with. `version` numbers them."""

    config: TelescopeConfig
    clients: Sequence[EngineBackend]
    folder: Path
    version: int

    def __post_init__(self) -> None:
        self._locks = [asyncio.Lock() for _ in self.clients]

    async def use(self, folder: Path, version: int, servers: Sequence[int]) -> None:
        """Loads another folder into `servers`. Other servers load it when they restart (`sync_one`)."""
        self.folder, self.version = folder, version
        await asyncio.gather(*(self.sync_one(server, lambda: None, fresh=False) for server in servers))

    async def sync_one(self, server: int, on_loaded: Callable[[], None], *, fresh: bool) -> None:
        """Loads the folder into one server, unless an old process has it. Calls `on_loaded` before any other load.

        Raises InfrastructureError if the server fails, and RunError if it has loaded other weights.
        """
        client = self.clients[server]
        async with self._locks[server]:
            if fresh or client.loaded_version != self.version:
                await load_folder(client, self._update(), self.config.engine_dtype)
            on_loaded()

    def _update(self) -> UpdateInfo:
        config = self.config
        return make_update(
            folder_metas(self.folder),
            version=self.version,
            dtype=config.engine_dtype,
            bucket_mb=config.weight_broadcast_bucket_mb,
            timeout_seconds=config.weight_sync_timeout_seconds,
            folder=str(self.folder.absolute()),
        )


async def load_folder(client: EngineBackend, update: UpdateInfo, dtype: str) -> None:
    """Pauses a server, loads a model folder and verifies it. Raises RunError if other weights were loaded."""
    await client.pause()
    await client.transfer_mode()  # ends an update that failed in one worker and is still open in others
    await client.start_update()
    await client.update_weights(update)
    await client.finish_update(update.version)
    await client.resume()
    loaded = await client.fingerprints()
    if not loaded:
        raise InfrastructureError(f"no worker of {client.base_url} answered")
    report = await asyncio.to_thread(compare, sent=loaded[0]["read"], loaded=loaded, dtype=dtype)
    if not report.ok:
        raise RunError(f"server {client.server_index} has not loaded the weights of {update.folder}: {report}")
    logger.info("server %d has loaded %s: %s", client.server_index, update.folder, report)
