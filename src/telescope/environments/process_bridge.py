"""Runs in the Python of a `ProcessAgent`'s command: `python process_bridge.py BRIDGE.py`. Imports nothing of telescope.

The bridge's `opened(name, options)` is an async context manager. It yields its tasks (`id`, `prompt`, and optionally
`answer` and `info`) and a coroutine function, which plays the task of a request (`task`, `base_url`, `api_key`,
`model`) and returns `reward` and `metrics`. Messages are JSON lines; output that a bridge prints goes to standard
error.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: some of its modules have names of the standard library

import asyncio
import json
import os
import runpy
import traceback
from typing import Any


async def main(bridge: str) -> None:
    """Lists the tasks, then plays requested ones, several at a time, until standard input ends."""
    requests, out = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # child processes of a bridge must not read requests or write replies
    os.dup2(2, 1)
    running: dict[str, asyncio.Task[None]] = {}

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message, default=float), file=out, flush=True)  # numbers of numpy and torch too

    async def answer(request: dict[str, Any]) -> None:
        try:
            send({"id": request["id"], **(await play(request))})
        except BaseException as error:  # also of a result that is no JSON
            traceback.print_exc()
            send({"id": request["id"], "error": f"{type(error).__name__}: {error}"})
        finally:
            del running[request["id"]]

    first = json.loads(await asyncio.to_thread(requests.readline))
    async with runpy.run_path(bridge)["opened"](first["name"], first["options"]) as (tasks, play):
        for task in [*tasks, {"ready": True}]:
            send(task)
        while line := await asyncio.to_thread(requests.readline):
            request = json.loads(line)
            if "cancel" not in request:
                running[request["id"]] = asyncio.create_task(answer(request))
            elif request["cancel"] in running:
                running[request["cancel"]].cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
