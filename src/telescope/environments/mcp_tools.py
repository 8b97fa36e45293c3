"""Tools of MCP servers, for any `ToolEnvironment`: `tools: [{mcp: "uvx mcp-server-time"}, {mcp: "http://host/mcp"}]`.

The constructor asks each server for its tools, because prompts show them, and closes it. From `prepare_resources` on,
each process has one connection to each server. A server that fails is an `InfrastructureError`, which masks the sample;
the next call connects again. A tool that fails is an error for the model.

Invariant: a connection is opened and closed by the same task (`Server._hold`), as the scopes of `mcp` require.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import shutil
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, Literal

import jsonschema

from telescope.environments.arguments import refuse_unknown
from telescope.environments.base import Environment, RolloutState
from telescope.environments.tool_calls import ToolResult
from telescope.environments.tool_env import ToolEnvironment
from telescope.environments.tool_schema import ArgumentError, Tool
from telescope.environments.user_code import error_text
from telescope.errors import InfrastructureError, UserError

START_SECONDS = 60.0
"""Time for a server to start and to list its tools. `uvx` and `npx` may download it first."""


class McpTools(ToolEnvironment):
    """A mixin for a `ToolEnvironment`, whose `tools` may then contain `{mcp: "command or URL"}`.

    `include` names the tools to take, by default all; `env` adds environment variables to those of the worker. A name
    that is taken already gets the name of the server in front.
    """

    resources_per: ClassVar[Literal["host", "process"]] = "process"

    def __init__(self, tools: list[str | Mapping[str, Any] | Callable[..., Any]] | None = None, **kwargs: Any) -> None:
        self._servers: list[Server] = []
        made: list[Any] = [tool for tool in tools or () if not isinstance(tool, Mapping)]
        taken = {tool if isinstance(tool, str) else getattr(tool, "__name__", "") for tool in made}
        for spec in (tool for tool in tools or () if isinstance(tool, Mapping)):
            self._servers.append(server := Server(**_checked(spec)))
            for tool in server.load_tools(taken):
                taken.add(tool.name)
                made.append(tool)
        super().__init__(tools=made, **kwargs)

    async def _wait_for(self, tool: Tool, result: Awaitable[Any]) -> ToolResult:
        if isinstance(tool, McpTool):
            await tool.server.client()  # a server that starts again takes no time from the tool
        return await super()._wait_for(tool, result)

    async def prepare_resources(self) -> None:
        """Connects to the servers."""
        await super().prepare_resources()
        await asyncio.gather(*(server.client() for server in self._servers))

    async def close_resources(self) -> None:
        """Closes the connections, which ends the servers that were started here."""
        await asyncio.gather(*(server.close() for server in self._servers))
        await super().close_resources()


class McpTool(Tool):
    """A tool of a server. Arguments are checked against the server's JSON schema."""

    def __init__(self, server: Server, declared: Any, name: str) -> None:
        self.server, self.name = server, name
        self.function = partial(server.call, declared.name)
        parameters = {"properties": {}, **declared.input_schema}
        self._validator = jsonschema.validators.validator_for(parameters)(parameters)
        function = {"name": name, "description": declared.description or "", "parameters": parameters}
        self.schema = {"type": "function", "function": function}

    def bind(self, arguments: Any, state: RolloutState | None = None) -> inspect.BoundArguments:
        """The arguments of one call: a dict of names, a list of positions, a JSON text of either, or None."""
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise ArgumentError(f"the arguments are not valid JSON: {error}") from None
        if isinstance(arguments, list):
            arguments = dict(zip(self._validator.schema["properties"], arguments, strict=False))
        arguments = arguments or {}
        if problem := jsonschema.exceptions.best_match(self._validator.iter_errors(arguments)):
            where = ".".join(map(str, problem.absolute_path))
            raise ArgumentError(f"{self.name}: {f'{where}: ' if where else ''}{problem.message}")
        return inspect.BoundArguments(inspect.signature(self.function), OrderedDict(arguments=arguments))


class Server:
    """An MCP server: a command that is started here, or a URL."""

    def __init__(self, mcp: str, include: list[str] | None = None, env: Mapping[str, str] | None = None) -> None:
        self.address, self.include, self.env = mcp, include, env or {}
        self._opened: asyncio.Future[Any] | None = None
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def load_tools(self, taken: set[str]) -> list[McpTool]:
        """Lists the tools over a connection of its own. Raises `UserError`."""

        async def load() -> list[McpTool]:
            try:
                return await self._list_tools(taken)
            except (UserError, InfrastructureError):
                raise
            except Exception as error:
                raise self._failure(error) from error
            finally:
                await self.close()

        command = shlex.split(self.address)
        if not self._is_url and not (command and shutil.which(command[0])):
            raise UserError(f"The MCP server {self.address!r} cannot be started: there is no such command.")
        try:
            with ThreadPoolExecutor(1) as thread:  # this one may run an event loop
                return thread.submit(asyncio.run, load()).result()
        except InfrastructureError as error:
            raise UserError(f"{error}. Start it by hand to see why.") from error

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Calls a tool. Raises `InfrastructureError` when the server fails."""
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS

        client = await self.client()
        try:
            result = await client.call_tool(name, arguments)
        except Exception as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                return ToolResult("", str(error), success=False, error="argument_error")
            self._over.set()  # the next call connects again
            raise self._failure(error) from error
        text = "\n".join(map(_block_text, result.content)) or json.dumps(result.structured_content)
        return ToolResult("", text, success=not result.is_error, error="tool_error" if result.is_error else None)

    async def client(self) -> Any:
        """Returns the connected client. Raises `InfrastructureError` when there is none after `START_SECONDS`."""
        if self._opened is None or self._over.is_set():
            self._opened, self._over = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._task = asyncio.create_task(self._hold(self._opened, self._over))
        opened = self._opened
        try:
            return await asyncio.wait_for(asyncio.shield(opened), START_SECONDS)
        except TimeoutError:
            await self.close()
            raise self._failure(f"it did not answer within {START_SECONDS:g} seconds") from None

    async def close(self) -> None:
        """Closes the connection."""
        self._over.set()
        if self._task is not None:
            if self._opened is not None and not self._opened.done():
                self._task.cancel()
            await asyncio.wait({self._task})

    async def _hold(self, opened: asyncio.Future[Any], over: asyncio.Event) -> None:
        try:
            async with self._make_client() as client:
                opened.set_result(client)
                await over.wait()
        except Exception as error:
            over.set()
            if not opened.done():
                opened.set_exception(self._failure(error))

    def _make_client(self) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        if self._is_url:
            return Client(self.address)
        # The guard kills the server with its children when this process ends in any way.
        guard = ["-m", "telescope.utils.child_guard", str(os.getpid())]
        parameters = StdioServerParameters(
            command=sys.executable, args=[*guard, *shlex.split(self.address)], env={**os.environ, **self.env}
        )
        return Client(stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr))

    async def _list_tools(self, taken: set[str]) -> list[McpTool]:
        client, cursor, listed = await self.client(), None, []
        while True:
            page = await client.list_tools(cursor=cursor)
            listed += page.tools
            if not (cursor := page.next_cursor):
                break
        known = {tool.name: tool for tool in listed}
        if missing := [name for name in self.include or () if name not in known]:
            raise UserError(f"The MCP server {self.address!r} has no tool {missing[0]!r}. It has: {', '.join(known)}.")
        prefix = _identifier(client.server_info.name if client.server_info else "mcp")
        made = []
        for name in self.include or known:
            short = _identifier(name)
            made.append(McpTool(self, known[name], f"{prefix}_{short}" if short in taken else short))
        return made

    @property
    def _is_url(self) -> bool:
        return self.address.startswith(("http://", "https://"))

    def _failure(self, problem: BaseException | str) -> InfrastructureError:
        text = problem if isinstance(problem, str) else error_text(problem)
        return InfrastructureError(f"The MCP server {self.address!r} failed: {text}")


def with_mcp_tools(cls: type[Environment]) -> type[Environment]:
    """Returns a `ToolEnvironment` with `McpTools`; any other class as it is."""
    if not issubclass(cls, ToolEnvironment) or issubclass(cls, McpTools):
        return cls
    return type(cls.__name__, (McpTools, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _checked(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    refuse_unknown(spec, {"mcp", "include", "env"}, "A tool of an MCP server")
    if not isinstance(spec.get("mcp"), str):
        raise UserError(f"The tool {dict(spec)} has no command or URL; write {{mcp: ...}}.")
    return spec


def _identifier(name: str) -> str:
    return re.sub(r"\W|^(?=\d)", "_", name)


def _block_text(block: Any) -> str:
    """The text of a block of a result, or its type in brackets, such as `[image]`."""
    text = getattr(block, "text", None)
    return text if text is not None else getattr(getattr(block, "resource", None), "text", None) or f"[{block.type}]"
