"""What a real vLLM server does when the process of its engine dies while calls and held requests wait for it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.integration.weights.vllm_server import Server, make_model, serving

from telescope.errors import InfrastructureError
from telescope.rollout.types import GenerateRequest

pytestmark = pytest.mark.e2e

NUM_RUNNING = 80
"""Requests that are in the engine, or on their way there, when the sync begins in which it dies."""


def test_an_engine_killed_in_the_middle_of_a_sync_leaves_no_request_waiting_and_ends_its_server(tmp_path: Path) -> None:
    with serving(Server(make_model(tmp_path, tied=True), tmp_path)) as server:
        running = [server.loop.create_task(sample(server, f"running-{i}", max_tokens=200)) for i in range(NUM_RUNNING)]
        server.run(half_in_the_engine(server))
        started = time.monotonic()
        asking = server.loop.create_task(ask_on_and_on(server))
        held: list[asyncio.Task[object]] = []  # the server holds it back, since it comes during the pause
        failure, _ = server.core_killed_in_a_sync(
            lambda: held.append(server.loop.create_task(sample(server, "held", max_tokens=4)))
        )
        assert isinstance(failure, InfrastructureError)
        with pytest.raises(InfrastructureError):
            server.run(asking)
        with pytest.raises(InfrastructureError, match="has exited"):
            server.run(held[0])
        assert time.monotonic() - started < 30  # an update may take 60, and a request half an hour
        while server.process.poll() is None:
            assert time.monotonic() - started < 60, "the server goes on without its engine"
            time.sleep(0.1)
        ended = server.run(asyncio.gather(*running, return_exceptions=True))
        assert sum(isinstance(answer, InfrastructureError) for answer in ended) > NUM_RUNNING // 4
        # vLLM gives them all one exception, to whose traceback each adds its own part.
        assert server.process.log_path.read_text(errors="replace").count("Traceback") < NUM_RUNNING // 4


async def sample(server: Server, name: str, *, max_tokens: int) -> object:
    request = GenerateRequest(request_id=name, prompt_token_ids=[1, 2, 3], max_tokens=max_tokens, temperature=1.0)
    return await server.client.generate(request)


async def half_in_the_engine(server: Server) -> None:
    """Wait until the engine has half of the requests that are to be in it when it dies."""
    async with asyncio.timeout(30):
        num_in_engine = 0.0
        while num_in_engine < NUM_RUNNING / 2:
            metrics = await server.client.metrics()
            num_in_engine = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]


async def ask_on_and_on(server: Server) -> object:
    """Whether it is paused, which the engine is asked and cannot say while it takes weights."""
    while True:
        await server.client.is_paused()
