from collections.abc import AsyncIterator

import pytest
from tests.unit.rollout.endpoint_policy import Policy

from telescope.rollout.endpoint import Endpoint


@pytest.fixture
async def policy() -> AsyncIterator[Policy]:
    server = Endpoint(["policy", "org/model"])
    await server.start()
    yield Policy(server)
    await server.stop()
