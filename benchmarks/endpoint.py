"""Measures the agents' endpoint of a rollout worker with a scripted policy.

    python benchmarks/endpoint.py                          every API, short and long histories
    python benchmarks/endpoint.py --quick                  one second a row
    python benchmarks/endpoint.py --json results.json      with machine and commit

The server is in this process, the client in another. `call ms` is the median time of a call while no other is open.
`added ms` is what of it remains without the median time of an equal request that a bare HTTP server answers at once, in
turns with it. `calls/s` is with 32 connections. `CPU ms` is this process's time for such a call, whatever else the
machine does, and `calls/s a core` what follows from it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
from aiohttp import web
from command_line import parser_of, write_json
from measure import provenance
from rich.console import Console
from rich.table import Table

from telescope.environments.context import Answer, Call
from telescope.environments.tool_calls import ToolCall
from telescope.rollout.endpoint import Endpoint

CONNECTIONS = 32
ROUTES = ("chat/completions", "responses", "messages")
HISTORIES = {"2 KB": 4, "100 KB": 200}
"""Size of a request and its number of turns, of 500 characters each."""

TURNS = 3
"""Times that the endpoint and the bare server take turns."""

MAX_ADDED_MS = 1.0
MIN_CALLS_PER_SECOND = 2000


def body_of(route: str, turns: int, stream: bool) -> bytes:
    """Returns a request with a history and a tool."""
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    tool: dict[str, Any] = {"name": "shell", "description": "Runs a command.", "parameters": parameters}
    history = [{"role": ("user", "assistant")[turn % 2], "content": "word " * 100} for turn in range(turns)]
    history.append({"role": "user", "content": "And now?"})
    body: dict[str, Any] = {"model": "policy", "stream": stream, "messages": history}
    if route == "responses":
        body["input"], body["tools"] = body.pop("messages"), [{"type": "function", **tool}]
    elif route == "messages":
        body["max_tokens"], body["tools"] = 500, [{"name": "shell", "input_schema": parameters}]
    else:
        body["tools"] = [{"type": "function", "function": tool}]
    return json.dumps(body).encode()


def client(url: str, key: str, body: bytes, connections: int, seconds: float, results: Any) -> None:
    """Sends calls for some seconds, each connection one after the other. Sends back the seconds that each took."""

    async def run() -> list[float]:
        took: list[float] = []
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connector = aiohttp.TCPConnector(limit=0)

        async def caller(session: aiohttp.ClientSession, end: float) -> None:
            while (begin := time.perf_counter()) < end:
                async with session.post(url, data=body, headers=headers) as response:
                    await response.read()
                    assert response.status == 200, await response.text()
                took.append(time.perf_counter() - begin)

        async with aiohttp.ClientSession(connector=connector) as session:
            await caller(session, time.perf_counter() + 0.2)
            took.clear()
            end = time.perf_counter() + seconds
            await asyncio.gather(*(caller(session, end) for _ in range(connections)))
        return took

    results.send(asyncio.run(run()))


async def measure(route: str, turns: int, stream: bool, seconds: float) -> dict[str, float]:
    """Returns the numbers of one row."""
    ids = itertools.count()
    calls = [ToolCall("shell", {"command": "ls -la"})]

    async def complete(call: Call) -> Answer:
        await asyncio.sleep(0)
        token_ids: Sequence[int] = range(200)
        return Answer(
            "Let me look.", "Which file?", calls, "tool_calls", token_ids, [-0.5] * 200, 900, id=str(next(ids))
        )

    async def load(connections: int, base_url: str, seconds: float) -> list[float]:
        key = server.open(complete, lambda call: 0)
        results, theirs = spawn.Pipe(duplex=False)
        arguments = (f"{base_url}/{route}", key, body_of(route, turns, stream), connections, seconds, theirs)
        process = spawn.Process(target=client, args=arguments, daemon=True)
        process.start()
        theirs.close()
        took = await asyncio.to_thread(results.recv)  # raises if the client has failed
        process.join()
        server.close_rollout(key)
        return took

    spawn = multiprocessing.get_context("spawn")
    server = Endpoint(["policy"])
    await server.start()
    bare = web.ServerRunner(web.Server(answer_at_once))
    await bare.setup()
    await web.TCPSite(bare, "127.0.0.1", 0).start()
    address = "http://{}:{}".format(*bare.addresses[0])
    alone: list[float] = []
    without: list[float] = []
    for _ in range(TURNS):
        alone += await load(1, server.base_url(), seconds / TURNS)
        without += await load(1, address, seconds / TURNS)
    await bare.cleanup()
    first, begin = next(ids), time.process_time()
    together = await load(CONNECTIONS, server.base_url(), seconds)
    cpu = time.process_time() - begin
    answered = next(ids) - first - 1
    await server.stop()
    return {
        "call_ms": 1000 * statistics.median(alone),
        "added_ms": 1000 * (statistics.median(alone) - statistics.median(without)),
        "calls_per_second": len(together) / seconds,
        "cpu_ms": 1000 * cpu / answered,
        "calls_per_second_and_core": answered / cpu,
    }


async def answer_at_once(request: web.BaseRequest) -> web.Response:
    """Reads a request and answers with as many bytes as an answer of the endpoint has."""
    await request.read()
    return web.Response(body=b"x" * 700, content_type="application/json")


def main() -> int:
    arguments = parser_of(__doc__, "one second a row").parse_args()
    where = provenance(["aiohttp"])
    table = Table("API", "history", "stream", "call ms", "added ms", "calls/s", "CPU ms", "calls/s a core")
    rows: list[dict[str, Any]] = []
    for route, (size, turns), stream in itertools.product(ROUTES, HISTORIES.items(), (False, True)):
        row = asyncio.run(measure(route, turns, stream, 1 if arguments.quick else 5))
        rows.append({"api": route, "history": size, "stream": stream, **row})
        slow = size == "2 KB" and (
            row["added_ms"] > MAX_ADDED_MS or row["calls_per_second_and_core"] < MIN_CALLS_PER_SECOND
        )
        cells = (
            route, size, "yes" if stream else "no", f"{row['call_ms']:.2f}", f"{row['added_ms']:.2f}",
            f"{row['calls_per_second']:.0f}", f"{row['cpu_ms']:.3f}", f"{row['calls_per_second_and_core']:.0f}",
        )  # fmt: skip
        table.add_row(*cells, style="red" if slow else None)
    Console().print(table)
    write_json(arguments.json, {"where": where, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
