"""Base of the cloud providers: imports an SDK late, finds the key, and keeps a client for each event loop."""

from __future__ import annotations

import asyncio
import importlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from telescope.sandbox.errors import SandboxSetupError
from telescope.sandbox.remote import RemoteSandboxProvider


class CloudSandboxProvider(RemoteSandboxProvider):
    """A provider that uses an SDK. Without `api_key` the SDK finds the key itself."""

    modules: ClassVar[tuple[str, ...]]
    """Possible names of the SDK's module, in order of preference."""
    package: ClassVar[str]
    key_variables: ClassVar[tuple[str, ...]]
    """Environment variables that may have the key."""
    key_file: ClassVar[str] = ""
    """File in the home folder that may have the key instead."""

    def __init__(self, api_key: str | None = None) -> None:
        super().__init__()
        self.api_key = api_key
        module = next(filter(find_spec, self.modules), self.modules[0])
        try:
            self.sdk: Any = importlib.import_module(module)
        except ImportError as error:
            raise SandboxSetupError(
                f"The sandbox provider {self.name!r} needs the package {self.package}. "
                f"Install it: uv pip install {self.package}   (or: pip install {self.package})"
            ) from error
        has_file = bool(self.key_file) and Path(self.key_file).expanduser().exists()
        if not (api_key or has_file or any(map(os.environ.get, self.key_variables))):
            raise SandboxSetupError(f"The sandbox provider {self.name!r} has no key. {self.setup_hint}")
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    def _connect(self) -> Any:
        """Returns a new SDK client, if the SDK has one."""
        raise NotImplementedError

    @property
    def client(self) -> Any:
        """Returns the client of the current event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = self._connect()
        return self._clients[loop]

    async def close(self) -> None:
        if client := self._clients.pop(asyncio.get_running_loop(), None):
            await (client.aclose if hasattr(client, "aclose") else client.close)()  # depends on the SDK
