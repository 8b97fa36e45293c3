"""Environments in a process of their own, by a bridge that uses the standard library alone."""

import asyncio
import contextlib
import os
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from aiohttp import web
from tests.processes import has_ended

from telescope.environments import process_agent
from telescope.environments.context import RolloutContext
from telescope.environments.process_agent import ProcessAgent
from telescope.environments.registry import environment_class
from telescope.errors import EnvironmentFailure, UserError

BRIDGE = """
import asyncio, contextlib, fractions, json, os, subprocess, sys, time, types, urllib.request

@contextlib.asynccontextmanager
async def opened(name, options):
    if options.get("breaks"):
        raise RuntimeError("no such taskset")
    time.sleep(options.get("delay", 0))
    print("a print of the bridge")
    sleeper = subprocess.Popen(["sleep", "600"])

    def ask(request):
        body = {"model": request["model"], "messages": [{"role": "user", "content": "galaxy"}]}
        headers = {"Authorization": f"Bearer {request['api_key']}", "Content-Type": "application/json"}
        url = request["base_url"] + "/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    async def play(request):
        kind = request["task"]
        if kind == "exit":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        if kind == "hang":
            time.sleep(600)
        if kind == "slow":
            await asyncio.sleep(600)
        if kind == "raise":
            raise ValueError("a bad task")
        if kind == "number":
            return {"reward": fractions.Fraction(1, 2)}
        if kind == "object":
            return {"reward": object()}
        answer = await asyncio.to_thread(ask, request)
        return {"reward": float(answer == "yxalag"), "metrics": {"sleeper": sleeper.pid, "bridge": os.getpid()}}

    kinds = ("answer", "exit", "hang", "slow", "raise", "number", "object")
    yield [{"id": kind, "prompt": f"{name} {kind}"} for kind in kinds], play
"""
ANSWER, EXIT, HANG, SLOW, RAISE, NUMBER, OBJECT = range(7)


class Scripted(ProcessAgent):
    task = "words"
    default_command = (sys.executable,)


class Services:
    """Where the policy answers."""

    api_key = "secret"

    def __init__(self, url: str) -> None:
        self.url = url

    def base_url(self, chat: str) -> str:
        return self.url


@pytest.fixture
async def services(unused_tcp_port) -> AsyncIterator[Services]:
    """A policy that spells backwards, and needs its key."""

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        if (request.headers["Authorization"], body["model"]) != ("Bearer secret", "policy"):
            return web.Response(status=401)
        return web.json_response({"choices": [{"message": {"content": body["messages"][-1]["content"][::-1]}}]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    yield Services(f"http://127.0.0.1:{unused_tcp_port}/v1")
    await runner.cleanup()


@pytest.fixture
async def environment(tmp_path) -> AsyncIterator[ProcessAgent]:
    made = make(tmp_path)
    await made.prepare_resources()
    yield made
    await made.close_resources()


def make(folder: Path, **kwargs) -> ProcessAgent:
    (folder / "bridge.py").write_text(BRIDGE)
    return type("Scripted", (Scripted,), {"bridge": folder / "bridge.py"})(**kwargs)


async def roll_out(environment: ProcessAgent, services: Services, item: int, seconds: float = 60.0):
    return await environment.rollout(environment.get_sample(item), RolloutContext(services, time.monotonic() + seconds))


async def test_tasks_of_a_process_are_played_by_the_policy_several_at_a_time(environment, services):
    assert [environment.get_sample(i).prompt for i in (0, 1)] == ["words answer", "words exit"]
    slow = asyncio.create_task(roll_out(environment, services, SLOW))
    results = await asyncio.gather(*(roll_out(environment, services, ANSWER) for _ in range(3)))
    assert [result.total_reward for result in results] == [1.0] * 3
    assert len({result.sample_metrics["bridge"] for result in results}) == 1
    with pytest.raises(EnvironmentFailure, match="ValueError: a bad task"):
        await roll_out(environment, services, RAISE)
    assert not slow.done()
    slow.cancel()
    await environment.close_resources()
    assert await asyncio.to_thread(has_ended, *map(int, results[0].sample_metrics.values()))


async def test_a_result_that_is_not_json_is_converted_or_named(environment, services):
    assert (await roll_out(environment, services, NUMBER)).total_reward == 0.5
    with pytest.raises(EnvironmentFailure, match="must be a string or a real number, not 'object'"):
        await roll_out(environment, services, OBJECT, seconds=20)


async def test_a_process_that_exits_fails_its_tasks_and_is_started_again(environment, services):
    slow = asyncio.create_task(roll_out(environment, services, SLOW))
    first = await roll_out(environment, services, ANSWER)
    for _ in range(process_agent.MAX_STARTS):
        with pytest.raises(EnvironmentFailure, match="last words"):
            await roll_out(environment, services, EXIT)
        with pytest.raises(EnvironmentFailure, match="last words"):
            await slow
        again = await roll_out(environment, services, ANSWER)
    assert again.total_reward == 1.0
    assert again.sample_metrics["bridge"] != first.sample_metrics["bridge"]
    for _ in range(1 + process_agent.MAX_STARTS):
        with pytest.raises(EnvironmentFailure, match="last words"):
            await roll_out(environment, services, EXIT)
    with pytest.raises(EnvironmentFailure, match="started 3 times and finished no task"):
        await roll_out(environment, services, ANSWER)


async def test_a_task_that_takes_too_long_fails_alone_unless_its_process_hangs(environment, services, monkeypatch):
    monkeypatch.setattr(process_agent, "CANCEL_SECONDS", 0.5)
    first = await roll_out(environment, services, ANSWER)
    with pytest.raises(EnvironmentFailure, match="took over 1 seconds"):
        await roll_out(environment, services, SLOW, seconds=1.0)
    await asyncio.sleep(1.0)
    assert (await roll_out(environment, services, ANSWER)).sample_metrics == first.sample_metrics
    with pytest.raises(EnvironmentFailure, match="took over 1 seconds"):
        await roll_out(environment, services, HANG, seconds=1.0)
    await asyncio.sleep(1.0)
    assert await asyncio.to_thread(has_ended, int(first.sample_metrics["bridge"]))
    assert (await roll_out(environment, services, ANSWER)).total_reward == 1.0


async def test_a_start_that_is_cancelled_leaves_no_process_and_the_next_task_starts_another(tmp_path, services):
    made = make(tmp_path, options={"delay": 1.0})
    for delay in (0.0, 0.5):
        starting = asyncio.create_task(made.prepare_resources())
        await asyncio.sleep(delay)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await made.close_resources()
    assert await asyncio.to_thread(has_ended, made._child._process.pid)
    assert (await roll_out(made, services, ANSWER)).total_reward == 1.0
    await made.close_resources()


def test_a_process_that_lists_no_tasks_is_an_error_with_its_last_words(tmp_path):
    with pytest.raises(UserError, match=r"(?s)cannot be listed.*: it ended before.*no such taskset"):
        len(make(tmp_path, options={"breaks": True}))
    with pytest.raises(UserError, match=r"started with 'no-such-python' .* Install it, or set `command`"):
        len(make(tmp_path, command=["no-such-python", "-X"]))


def test_a_process_ends_with_a_worker_that_is_killed(tmp_path):
    code = f"""
        import asyncio, pathlib
        from telescope.environments.process_agent import Child
        from tests.integration.environments.test_process_agent import make
        async def main():
            child = Child()
            await child.start(make(pathlib.Path({str(tmp_path)!r})))
            print(child._process.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    guard = psutil.Process(int(worker.stdout.readline()))
    processes = [guard, *guard.children(recursive=True)]
    assert len(processes) == 3  # with the bridge and its child
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert has_ended(*(process.pid for process in processes))


@pytest.mark.parametrize("name", ["verifiers:my-taskset", "openenv:http://127.0.0.1:8000"])
def test_bridges_that_ship_are_found_by_their_names(name):
    cls = environment_class(name)
    assert issubclass(cls, ProcessAgent)
    assert (cls.task, cls.bridge.is_file()) == (name.partition(":")[2], True)


class Server:
    """An OpenEnv server with one session, whose actions are numbers; each is its own reward."""

    num_open = 0

    def __init__(self, base_url: str) -> None:
        assert base_url == "http://here"
        self.is_open = False

    async def connect(self) -> None:
        self.is_open = Server.num_open == 0
        Server.num_open += self.is_open

    async def disconnect(self, *_: object) -> None:
        Server.num_open -= self.is_open
        self.is_open = False

    async def __aenter__(self) -> "Server":
        await self.connect()
        return self

    __aexit__ = disconnect

    async def reset(self, seed: int) -> Any:
        if not self.is_open:
            raise RuntimeError("Server error: Server at capacity (code: CAPACITY_REACHED)")
        return SimpleNamespace(observation={"seed": seed}, done=False, reward=0.0)

    async def step(self, action: dict[str, Any]) -> Any:
        if not isinstance(action["number"], int):
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        return SimpleNamespace(observation={}, done=True, reward=action["number"])


class Model:
    """A client whose model answers by the first observation."""

    def __init__(self, **_: Any) -> None:
        self.chat = SimpleNamespace(completions=self)

    async def __aenter__(self) -> "Model":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def create(self, messages: list[Any], model: str) -> Any:
        await asyncio.sleep(0)
        answer = SimpleNamespace(content=model, model_dump=lambda **_: {"role": "assistant", "content": model})
        return SimpleNamespace(choices=[SimpleNamespace(message=answer)])


@pytest.fixture
def openenv(monkeypatch) -> Callable[..., Any]:
    core, client = ModuleType("openenv.core"), ModuleType("openai")
    vars(core)["GenericEnvClient"] = Server
    vars(client).update(AsyncOpenAI=Model, BadRequestError=ValueError)
    for module in (ModuleType("openenv"), core, client):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    opened = runpy.run_path(str(environment_class("openenv:http://here").bridge))["opened"]
    opened.__globals__["CAPACITY_SECONDS"] = 0.001
    return opened


async def test_episodes_of_a_server_wait_for_its_only_session(openenv):
    async with openenv("http://here/", {"num_tasks": 3, "action_field": "number"}) as (tasks, play):
        requests = [{"task": task["id"], "model": '{"number": 2}', "base_url": "", "api_key": ""} for task in tasks]
        assert [result["reward"] for result in await asyncio.gather(*map(play, requests))] == [2, 2, 2]


async def test_an_action_that_a_server_refuses_ends_the_episode_with_its_reward(openenv):
    async with openenv("http://here", {"num_tasks": 1, "action_field": "number"}) as (_, play):
        result = await play({"task": 0, "model": "seven", "base_url": "", "api_key": ""})
    assert result == {"reward": 0.0, "metrics": {"num_turns": 1, "finished": 0.0}}


async def test_a_misspelled_option_of_openenv_is_refused(openenv):
    with pytest.raises(ValueError, match="options has max_turn; it takes action_field, max_turns"):
        async with openenv("http://here", {"max_turn": 3}):
            pass


async def test_an_endless_taskset_of_verifiers_needs_a_number_of_tasks(monkeypatch):
    class Endless:
        bounded = False
        take = staticmethod(lambda count: [SimpleNamespace(data=SimpleNamespace(prompt_text="Hi", name=""))] * count)

    loaders, v1 = ModuleType("verifiers.v1.utils.loaders"), ModuleType("verifiers.v1")
    made = SimpleNamespace(taskset=Endless(), serving=contextlib.AsyncExitStack)
    vars(loaders).update(load_environment=lambda _: made, resolve_env_config=lambda block: block)
    for module in (ModuleType("verifiers"), v1, ModuleType("verifiers.v1.utils"), loaders):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules["verifiers"], "v1", v1, raising=False)
    opened = runpy.run_path(str(environment_class("verifiers:words").bridge))["opened"]
    with pytest.raises(ValueError, match="never ends: set num_tasks"):
        async with opened("words", {}):
            pass
    async with opened("words", {"num_tasks": 2}) as (tasks, _):
        assert [task["id"] for task in tasks] == [0, 1]
