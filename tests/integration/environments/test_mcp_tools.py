"""Tools of real MCP servers, over standard input and output and over HTTP."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from telescope.environments.base import RewardResult, RolloutState, Sample, TrajectoryStep
from telescope.environments.mcp_tools import Server
from telescope.environments.records import assistant_message
from telescope.environments.registry import make_environment
from telescope.environments.tool_env import ToolEnvironment
from telescope.errors import InfrastructureError, UserError

SERVER = """
import asyncio, os, sys
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("abacus")

@server.tool()
def add(a: int, b: int = 1) -> int:
    "Add two numbers."
    return a + b

@server.tool(name="read-file")
def read(name: str) -> str:
    raise ToolError(f"no file {name}")

@server.tool(name="read.file")
def read_other(name: str) -> str:
    return name

@server.tool()
def exit(code: int) -> str:
    os._exit(code)

@server.tool()
async def hang() -> str:
    await asyncio.sleep(60)

@server.tool()
def variable(name: str) -> str:
    return f"{os.getpid()} {os.environ.get(name)}"

server.run(*(["streamable-http"] if sys.argv[1:] else []), **({"port": int(sys.argv[1])} if sys.argv[1:] else {}))
"""


def subtract(a: int, b: int) -> int:
    """Subtract."""
    return a - b


class Sums(ToolEnvironment):
    tool_timeout_seconds = 2.0

    def load_dataset(self, num_samples: int = -1) -> list[Sample]:
        return [Sample("1 + 2?", "3")]

    def compute_reward(self, state: RolloutState, eos_token: str = "") -> RewardResult:
        return RewardResult(0.0)


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(textwrap.dedent(SERVER))
    return shlex.join([sys.executable, str(file)])


def make(*tools) -> ToolEnvironment:
    environment = make_environment(Sums, "sums", {"tools": list(tools)})
    assert isinstance(environment, ToolEnvironment)
    return environment


async def answer(environment: ToolEnvironment, name: str, arguments: str) -> str:
    state = environment.create_initial_state(Sample("?"))
    text = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
    state.trajectory.append(TrajectoryStep([{"role": "user", "content": "?"}], [assistant_message(text)]))
    response = environment.env_response([], state)
    return (response if isinstance(response, list) else await response)[0]["content"]


async def test_a_started_server_serves_its_tools_for_as_long_as_the_resources_are_open(command):
    environment = make({"mcp": f"env ABACUS=9 {command}"}, subtract)
    schema = next(s["function"] for s in environment.tool_schemas if s["function"]["name"] == "add")
    assert schema["description"] == "Add two numbers."
    assert schema["parameters"]["required"] == ["a"]
    assert "Add two numbers." in environment.get_initial_prompt(environment.get_sample(0))[0]["content"]
    await environment.prepare_resources()
    try:
        assert await answer(environment, "add", '{"a": 2, "b": 3}') == "[add] 5"
        assert await answer(environment, "subtract", '{"a": 2, "b": 3}') == "[subtract] -1"
        assert "valid integer" in await answer(environment, "add", '{"a": "two"}')
        assert "no file x" in await answer(environment, "read_file", '{"name": "x"}')
        pid, value = (await answer(environment, "variable", '{"name": "ABACUS"}')).split()[1:]
        assert value == "9"
        assert "did not end within 2 seconds" in await answer(environment, "hang", "{}")
    finally:
        await environment.close_resources()
    assert not psutil.pid_exists(int(pid))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"mcp": ""}, "names no MCP server. Write mcp: COMMAND"),
        ({"include": ["add"]}, "names no MCP server"),
        ({"mcp": "no_such_program"}, "failed: MCPError: Connection closed"),
        ({"mcp": "uvx 'mcp-server-time"}, "failed: ValueError: No closing quotation"),
        ({"mcp": f"{sys.executable} -c 'from mcp.server import mcpserver as m; m.MCPServer(str()).run()'"}, "no tools"),
    ],
)  # fmt: skip
def test_a_server_without_an_address_a_program_or_tools_is_refused(spec, message, capfd):
    with pytest.raises(UserError, match=message):
        make(spec)
    assert "Traceback" not in capfd.readouterr().err


async def test_a_server_that_exits_masks_the_sample_and_is_started_again(command):
    with pytest.raises(UserError, match=r"no tool 'div'.*add, read-file"):
        make({"mcp": command, "include": ["div"]})
    environment = make({"mcp": command, "include": ["add", "exit"]})
    assert [schema["function"]["name"] for schema in environment.tool_schemas] == ["add", "exit"]
    await environment.prepare_resources()
    try:
        with pytest.raises(InfrastructureError, match="MCP server"):
            await answer(environment, "exit", '{"code": 3}')
        assert await answer(environment, "add", '{"a": 2}') == "[add] 3"
    finally:
        await environment.close_resources()


@pytest.fixture
def over_http(command, unused_tcp_port) -> Iterator[tuple[str, subprocess.Popen]]:
    """The URL of a server, and its process."""
    url = f"http://127.0.0.1:{unused_tcp_port}/mcp"
    process = subprocess.Popen([*shlex.split(command), str(unused_tcp_port)])
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(url, timeout=5)
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.wait()


async def test_a_late_failure_of_an_old_connection_does_not_close_the_new_one(monkeypatch):
    connections = []

    class Client:
        def __init__(self):
            self.is_first = not connections

        async def call_tool(self, name, arguments):
            if self.is_first:
                await asyncio.sleep(arguments["seconds"])
                raise ConnectionError
            return SimpleNamespace(content=[], structured_content={}, is_error=False)

    async def keep_open(self, opened, ended):
        opened.set_result(Client())
        connections.append(ended)
        await ended.wait()

    monkeypatch.setattr(Server, "_keep_open", keep_open)
    server = Server("words")
    calls = [asyncio.create_task(server.call("echo", {"seconds": seconds})) for seconds in (0.01, 0.05)]
    with pytest.raises(InfrastructureError):
        await calls[0]
    assert (await server.call("echo", {})).success
    with pytest.raises(InfrastructureError):
        await calls[1]
    assert [ended.is_set() for ended in connections] == [True, False]
    await server.close()


async def test_a_server_over_http_has_its_name_before_names_that_are_taken(command, over_http):
    url, process = over_http
    environment = make({"mcp": command, "include": ["add"]}, {"mcp": url, "include": ["add", "variable"]})
    assert list(environment.tool_map) == ["add", "abacus_add", "variable"]
    await environment.prepare_resources()
    assert await answer(environment, "abacus_add", '{"a": 2}') == "[abacus_add] 3"
    process.kill()
    process.wait()
    with pytest.raises(InfrastructureError, match=url):
        await answer(environment, "abacus_add", '{"a": 2}')
    assert await answer(environment, "add", '{"a": 2}') == "[add] 3"
    await environment.close_resources()


def test_names_of_one_server_or_of_three_with_one_name_that_are_equal_as_identifiers_stay_apart(command):
    one = {"mcp": command, "include": ["read-file", "read.file"]}
    add = {"mcp": command, "include": ["add"]}
    names = ["read_file", "abacus_read_file", "add", "abacus_add", "abacus2_add"]
    assert list(make(one, add, add, add).tool_map) == names


def test_a_started_server_ends_with_a_worker_that_is_killed(command, tmp_path):
    code = f"""
        import asyncio
        from tests.integration.environments.test_mcp_tools import answer, make
        async def main():
            environment = make({{"mcp": {command!r}}})
            await environment.prepare_resources()
            print(await answer(environment, "variable", '{{"name": "HOME"}}'), flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    pid = int(worker.stdout.readline().split()[1])
    assert psutil.pid_exists(pid)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"mcp": "no-such-command --fast"}, "no-such-command.*Start it by hand"),
        ({"mcp": "false"}, "Start it by hand"),
        ({"mcp": "x", "includes": ["add"]}, "Did you mean 'include'"),
        ({"mcp": "http://127.0.0.1:9/mcp"}, "127.0.0.1:9"),
    ],
)
def test_a_server_that_cannot_be_used_is_an_error_before_a_run(tool, message):
    with pytest.raises(UserError, match=message):
        make(tool)
