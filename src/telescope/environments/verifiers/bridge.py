"""Plays the tasks of a verifiers taskset. `process_bridge.py` runs it in the Python of `Verifiers`."""

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


@contextlib.asynccontextmanager
async def opened(name: str, options: dict[str, Any]) -> AsyncIterator[tuple[list[dict[str, Any]], Any]]:
    """Loads the taskset and its environment."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    most = options.pop("num_tasks", None)
    block = {"agent": agent, **options, "taskset": {**options.get("taskset", {}), "id": name}}
    environment = load_environment(resolve_env_config(block))
    if most is None and not environment.taskset.bounded:
        raise ValueError(f"the taskset {name} never ends: set num_tasks in options")
    tasks = list(environment.taskset if most is None else environment.taskset.take(most))

    async def play(request: dict[str, Any]) -> dict[str, Any]:
        variable = f"TELESCOPE_KEY_{request['id']}"  # verifiers reads keys from environment variables
        os.environ[variable] = request["api_key"]
        try:
            client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
            (slot,) = environment.slots(tasks[request["task"]])
            episode = await environment.run_slot(slot, vf.ModelContext(model=request["model"], client=client))
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [error for one in (episode, *episode.traces) if (error := one.last_error)]
            return {"error": f"{errors[0].type}: {errors[0].message}" if errors else "the episode is not ok"}
        traces = episode.traces
        metrics: dict[str, list[float]] = {}
        for trace in traces:
            for key, value in ({k: r and r.score for k, r in trace.rewards.items()} | trace.metrics).items():
                metrics.setdefault(key, []).extend([] if value is None else [value])
        means = {key: sum(values) / len(values) for key, values in metrics.items() if values}
        return {"reward": sum(trace.reward for trace in traces) / len(traces), "metrics": means}

    async with environment.serving():
        listed = [{"id": i, "prompt": task.data.prompt_text, "info": task.data.name} for i, task in enumerate(tasks)]
        yield listed, play
