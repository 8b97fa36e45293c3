"""The engine client over real HTTP, against the fake engine behind the real middlewares."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.fakes.backend import NO_WEIGHTS
from tests.fakes.client import ask_for_json, metrics_of
from tests.fakes.engine import FakeEngineSettings
from tests.fakes.server import FakeEngineServer
from tests.processes import eventually

from telescope.errors import InfrastructureError
from telescope.inference.base import GenerateRequest
from telescope.inference.client import EngineClient, EngineRequestError
from telescope.inference.vllm import adapter as wire
from telescope.weights.plan import InitInfo
from telescope.weights.probe import compare_logprobs

SLOW = {"mean_tokens": 400, "tokens_per_second": 200.0}


def request(name: str = "r", *, max_tokens: int = 1000, seed: int = 1, priority: int = 0) -> GenerateRequest:
    return GenerateRequest(name, [1, 2, 3], max_tokens, 1.0, seed=seed, priority=priority)


@pytest.fixture
async def connect() -> AsyncIterator[object]:
    """`connect(settings...)` starts a fake server and returns it with a client."""
    servers: list[FakeEngineServer] = []
    clients: list[EngineClient] = []

    async def start(client_options: dict | None = None, **settings: object) -> tuple[FakeEngineServer, EngineClient]:
        server = FakeEngineServer(FakeEngineSettings(**settings))
        await server.start()
        client = EngineClient(server.url, server.secret, 3, **(client_options or {}))
        servers.append(server)
        clients.append(client)
        return server, client

    yield start
    for client in clients:
        await client.close()
    for server in servers:
        await server.stop()


@asynccontextmanager
async def server_that_answers(
    answers: dict[str, Callable[[web.Request], Awaitable[web.Response]]], **options: Any
) -> AsyncIterator[EngineClient]:
    """A client of a server with these answers to requests by POST."""
    app = web.Application()
    for route, answer in answers.items():
        app.router.add_post(route, answer)
    async with TestServer(app) as server:
        client = EngineClient(str(server.make_url("")).rstrip("/"), "secret", 3, **options)
        yield client
        await client.close()


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
@pytest.mark.parametrize("packed", [True, False])
async def test_generation_has_ids_logprobs_versions_and_server(connect, version: str, packed: bool) -> None:
    _, client = await connect(mean_tokens=50, vllm_version=version)
    if not packed:
        ask_for_json(client)
    generation = await client.generate(request())
    assert len(generation.token_ids_N) == len(generation.logprobs_N) == 50
    assert generation.finish_reason == "stop"
    assert generation.version_spans == [(0, 0, 50)]
    again = await client.generate(request("again"))
    assert again.token_ids_N.tolist() == generation.token_ids_N.tolist()


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
@pytest.mark.parametrize("packed", [True, False])
async def test_tokens_have_their_version_across_an_update(connect, version: str, packed: bool) -> None:
    server, client = await connect(**SLOW, vllm_version=version)
    if not packed:
        ask_for_json(client)
    running = asyncio.create_task(client.generate(request("running")))
    await eventually(lambda: server.engine.num_running == 1, "admitted")
    await asyncio.sleep(0.1)
    await client.pause()
    waiting = asyncio.create_task(client.generate(request("waiting", max_tokens=5)))
    await client.start_update()
    await client.update_weights(NO_WEIGHTS)
    await client.finish_update(7)
    assert client.loaded_version == 7
    await client.resume()
    first, second = (await running).version_spans
    assert (first[0], second[0]) == (0, 7)
    assert first[1] == 0
    assert first[2] == second[1] > 0
    assert second[2] == 400
    assert (await waiting).version_spans == [(7, 0, 5)]
    salts = server.engine.salts
    assert salts["running"] != salts["waiting"]


async def test_abort_ends_requests_in_the_engine_at_once(connect) -> None:
    server, client = await connect(**SLOW, max_running=8)
    tasks = [asyncio.create_task(client.generate(request(f"r{i}"))) for i in range(16)]
    await eventually(lambda: len(server.engine.requests) == 16, "admitted")
    await asyncio.sleep(0.05)
    await client.abort([f"r{i}" for i in range(15)] + ["never-heard-of"])
    assert len(server.engine.requests) == 1
    generations = await asyncio.gather(*tasks[:15])
    assert {g.finish_reason for g in generations} == {"abort"}
    assert any(len(g.token_ids_N) > 0 for g in generations)
    assert (await tasks[15]).finish_reason == "stop"
    await client.abort([])


async def test_aborting_an_unanswered_request_ends_it_too(connect) -> None:
    server, client = await connect({"abort_grace": 0.1})
    server.app.hang_next = 1
    task = asyncio.create_task(client.generate(request()))
    await eventually(lambda: server.app.num_requests == 1, "arrived")
    await client.abort(["r"])
    assert (await task).finish_reason == "abort"
    assert not client._in_flight


async def test_cancelling_the_caller_ends_the_request_in_the_engine(connect) -> None:
    server, client = await connect(**SLOW)
    task = asyncio.create_task(client.generate(request()))
    await eventually(lambda: server.engine.num_running == 1, "admitted")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: server.engine.num_running == 0, "ended")
    assert not client._in_flight


async def test_generation_keeps_its_connection_and_a_control_call_has_its_own(connect) -> None:
    server, client = await connect()
    connections = server._server.server_state.connections
    for name in "abc":
        await client.generate(request(name))
        assert len(connections) == 1
    await client.pause()
    await eventually(lambda: len(connections) == 1, "the control call's connection is closed")


async def test_closing_the_client_fails_running_and_later_requests(connect) -> None:
    server, client = await connect(**SLOW)
    task = asyncio.create_task(client.generate(request()))
    await eventually(lambda: server.engine.num_running == 1, "admitted")
    await client.close()
    with pytest.raises(InfrastructureError):
        await task
    await eventually(lambda: server.engine.num_running == 0, "ended in the engine")
    with pytest.raises(InfrastructureError, match="closed"):
        await client.generate(request("later"))


@pytest.mark.parametrize("answer", [b"", b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"])
async def test_an_answer_that_is_none_or_half_is_an_infrastructure_failure(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "secret")
        with pytest.raises(InfrastructureError, match="request r: "):
            await client.generate(request())
        await client.close()


async def test_an_answer_across_thousands_of_syncs_has_all_its_version_spans() -> None:
    """vLLM 0.26 has them in a header."""
    starts = [(str(version), version) for version in range(3000)]

    async def answer(_: web.Request) -> web.Response:
        entries = {"content": [{"logprob": -1.0}] * len(starts)}
        choice = {"token_ids": [1] * len(starts), "logprobs": entries, "finish_reason": "stop"}
        headers = {wire.VERSION_SPANS_HEADER: json.dumps(starts)}
        return web.json_response({"choices": [choice]}, headers=headers)

    async with server_that_answers({wire.GENERATE_ROUTE: answer}) as client:
        assert len((await client.generate(request())).version_spans) == len(starts)


async def test_failing_exiting_hanging_and_absent_servers_are_infrastructure_failures(connect) -> None:
    server, client = await connect({"request_timeout": 1.0})
    server.app.fail_next = 1
    with pytest.raises(InfrastructureError, match="HTTP 500: EngineCore"):
        await client.generate(request("fails"))
    server.app.hang_next = 1
    with pytest.raises(InfrastructureError, match=r"request hangs .* no answer within 1 s"):
        await client.generate(request("hangs"))
    server.app.hang_next = 1
    failing = asyncio.create_task(client.generate(request("fails")))
    await eventually(lambda: server.app.num_requests == 3, "arrived")
    server.die()
    with pytest.raises(InfrastructureError, match="request fails"):
        await failing
    with pytest.raises(InfrastructureError, match="Connect"):
        await client.generate(request("absent"))
    assert not await client.health(within=1)
    await server.stop()
    await server.start()
    assert (await client.generate(request("works"))).finish_reason == "stop"
    assert await client.health()


async def test_a_server_whose_engine_does_not_answer_is_not_healthy(connect, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = await connect()

    async def hang(body: Any, query: dict[str, str]) -> tuple[int, Any]:
        await asyncio.sleep(600)
        return 200, {}

    assert await client.health()
    monkeypatch.setitem(server.app._routes, ("GET", "/is_paused"), hang)
    assert not await client.health(within=0.2)


async def test_refused_requests_raise_with_the_servers_message(connect) -> None:
    server, client = await connect(max_model_len=8, scheduling_policy="fcfs")
    with pytest.raises(EngineRequestError, match="maximum context length is 8"):
        await client.generate(GenerateRequest("long", list(range(9)), 4, 1.0))
    with pytest.raises(EngineRequestError, match="Priority scheduling is not enabled"):
        await client.generate(request(priority=1))
    unauthenticated = EngineClient(server.url, "wrong")
    with pytest.raises(EngineRequestError, match=r"HTTP 401: .*secret"):
        await unauthenticated.generate(request())
    await unauthenticated.close()


async def test_nan_weights_are_a_valid_probe_answer() -> None:
    async def answer(_: web.Request) -> web.Response:
        message = "Out of range float values are not JSON compliant"  # the message of vLLM 0.32
        return web.json_response({"error": {"message": message, "type": "BadRequestError", "code": 400}}, status=400)

    async with server_that_answers({wire.GENERATE_ROUTE: answer}) as client:
        logprobs = await client.prompt_logprobs([1, 2, 3])
    assert len(logprobs) == 2 and all(math.isnan(value) for value in logprobs)
    assert not compare_logprobs([-1.0, -2.0], logprobs, ["float32"]).ok


async def test_a_failure_in_one_worker_fails_the_server() -> None:
    """vLLM answers 200, because no worker may raise (see `vllm/weights`)."""
    failures: list[str | None] = [None, "the sender is gone"]

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"message": "Weights updated"})

    async def ask_workers(request: web.Request) -> web.Response:
        assert (await request.json())["method"] == "telescope_failure"
        return web.json_response({"results": [{"failure": failure} for failure in failures]})

    routes = {wire.UPDATE_WEIGHTS_ROUTE: answer, wire.COLLECTIVE_RPC_ROUTE: ask_workers}
    async with server_that_answers(routes, num_workers=2) as client:
        with pytest.raises(InfrastructureError, match=r"server 3 .*worker 1: the sender is gone"):
            await client.update_weights(NO_WEIGHTS)
        failures[1] = None
        await client.update_weights(NO_WEIGHTS)


async def test_one_request_id_is_not_used_twice_at_once(connect) -> None:
    server, client = await connect(**SLOW)
    task = asyncio.create_task(client.generate(request()))
    await eventually(lambda: server.engine.num_running == 1, "admitted")
    with pytest.raises(EngineRequestError, match="already in flight"):
        await client.generate(request())
    await client.abort(["r"])
    await task


async def test_control_calls_fail_by_name(connect) -> None:
    _, client = await connect({"update_timeout": 2.0}, update_seconds=30)
    with pytest.raises(InfrastructureError, match=r"POST /finish_weight_update: HTTP 500: .*matching start"):
        await client.finish_update(1)
    assert client.loaded_version == 0, "of an update that has failed"
    await client.start_update()
    with pytest.raises(InfrastructureError, match=r"POST /update_weights had no answer within"):
        await client.update_weights(NO_WEIGHTS)


async def test_state_of_the_server_is_readable(connect) -> None:
    server, client = await connect(**SLOW)
    await client.pause()
    assert server.engine.paused
    await client.resume()
    task = asyncio.create_task(client.generate(request()))
    await eventually(lambda: server.engine.num_running == 1, "admitted")
    assert (await metrics_of(client))["vllm:num_requests_running"] == 1
    await client.abort(["r"])
    await task
    info = InitInfo("here", 1, "token", 2, "gloo", 1.0)
    await client.init_weight_transfer(info)
    assert server.engine.transfer_info == [asdict(info)]
    assert await client.call_worker("anything") == [{}]
    before = await client.prompt_logprobs([5, 6, 7])
    assert len(before) == 2
    await client.start_update()
    await client.finish_update(1)
    assert await client.prompt_logprobs([5, 6, 7]) != before


async def test_a_thousand_requests_in_flight_come_back_each_with_its_own_answer(connect) -> None:
    server, client = await connect(mean_tokens=40, length_sigma=0.5, tokens_per_second=400.0)
    generations = await asyncio.gather(*(client.generate(request(f"r{i}", seed=i)) for i in range(1000)))
    assert server.engine.num_finished == 1000
    assert len({g.token_ids_N.tobytes() for g in generations}) > 990
    alone = await client.generate(request("alone", seed=17))
    assert alone.token_ids_N.tolist() == generations[17].token_ids_N.tolist()


async def test_weights_arrive_in_the_background_only_if_every_worker_of_a_server_can_receive_them_so(
    connect, monkeypatch
) -> None:
    _, client = await connect()
    modes = [
        {"background": True},
        {"background": False, "reason": "no memory"},
        {"background": False, "reason": "no memory"},
    ]

    async def call_worker(method: str, arguments: Any = None) -> list[dict[str, Any]]:
        return modes

    monkeypatch.setattr(client, "call_worker", call_worker)
    assert await client.transfer_mode() == "no memory"
    del modes[1:]
    assert await client.transfer_mode() is None
