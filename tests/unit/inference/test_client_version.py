"""The version that a client reports for its server, before and after an update."""

from __future__ import annotations

from typing import Any

import pytest

from telescope.errors import InfrastructureError
from telescope.inference.client import EngineClient


@pytest.mark.parametrize("failure", [None, InfrastructureError("the server is gone")])
async def test_a_server_holds_the_new_version_once_it_has_answered_the_end_of_the_update(failure, monkeypatch):
    client = EngineClient("http://127.0.0.1:9", "secret", initial_version=2)
    seen = []

    async def answer(*_: Any, **__: Any) -> bytes:
        seen.append(client.loaded_version)
        if failure is not None:
            raise failure
        return b""

    monkeypatch.setattr(client, "_control", answer)
    if failure is None:
        await client.finish_update(3)
    else:
        with pytest.raises(InfrastructureError):
            await client.finish_update(3)
    assert seen == [2]
    assert client.loaded_version == (3 if failure is None else 2)
