"""Plays episodes of an OpenEnv server. `process_bridge.py` runs it in the Python of `OpenEnv`."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from openai import AsyncOpenAI, BadRequestError
from openenv.core import GenericEnvClient

OPTIONS = {"num_tasks", "seed", "reset", "max_turns", "observation_field", "action_field"}
CAPACITY_SECONDS = 0.2
"""Pause before an episode is started again on a server whose sessions are all in use (by default it has one)."""


@contextlib.asynccontextmanager
async def opened(name: str, options: dict[str, Any]) -> AsyncIterator[tuple[list[dict[str, Any]], Any]]:
    """Asks the server for the first observation of each episode."""
    if unknown := options.keys() - OPTIONS:
        raise ValueError(f"options has {', '.join(sorted(unknown))}; it takes {', '.join(sorted(OPTIONS))}")
    name = name.rstrip("/")
    field, action_field = options.get("observation_field"), options.get("action_field")
    if action_field is None:
        async with httpx.AsyncClient() as client:
            schema = (await client.get(f"{name}/schema")).raise_for_status().json()
        required = schema["action"].get("required", [])
        action_field = required[0] if len(required) == 1 else None
    resets = [
        {**options.get("reset", {}), "seed": options.get("seed", 0) + i} for i in range(options.get("num_tasks", 100))
    ]

    def shown(observation: dict[str, Any]) -> str:
        return str(observation[field]) if field else json.dumps(observation)

    def action_of(answer: str) -> dict[str, Any] | None:
        with contextlib.suppress(ValueError):
            if isinstance(action := json.loads(answer), dict):
                return action
        return {action_field: answer} if action_field else None

    async def started(server: GenericEnvClient, reset: dict[str, Any]) -> Any:
        """Returns the first result of an episode, once the server has a session for it."""
        while True:
            try:
                return await server.reset(**reset)
            except RuntimeError as error:
                if "CAPACITY_REACHED" not in str(error):
                    raise
                await server.disconnect()
                await asyncio.sleep(CAPACITY_SECONDS)
                await server.connect()

    async def play(request: dict[str, Any]) -> dict[str, Any]:
        model = AsyncOpenAI(base_url=request["base_url"], api_key=request["api_key"], max_retries=0)
        messages: list[Any] = []
        reward, turns = 0.0, 0
        async with model, GenericEnvClient(base_url=name) as server:
            result = await started(server, resets[request["task"]])
            while not result.done and turns < options.get("max_turns", 10):
                turns += 1
                messages.append({"role": "user", "content": shown(result.observation)})
                try:
                    completion = await model.chat.completions.create(model=request["model"], messages=messages)
                except BadRequestError:  # the conversation fills the context
                    break
                answer = completion.choices[0].message
                messages.append(answer.model_dump(exclude_none=True))
                if (action := action_of(answer.content or "")) is None:
                    break
                try:
                    result = await server.step(action)
                except RuntimeError as error:
                    if "VALIDATION_ERROR" not in str(error):
                        raise
                    break
                reward += result.reward or 0.0
        return {"reward": reward, "metrics": {"num_turns": turns, "finished": float(result.done)}}

    tasks = []
    async with GenericEnvClient(base_url=name) as server:
        for position, reset in enumerate(resets):
            first = await started(server, reset)
            tasks.append({"id": position, "prompt": shown(first.observation)})
    yield tasks, play
