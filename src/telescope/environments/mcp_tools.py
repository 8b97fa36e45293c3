"""Tools of MCP servers, for any `ToolEnvironment`: `tools: [{mcp: "uvx mcp-server-time"}, {mcp: "http://host/mcp"}]`.

The constructor asks each server for its tools, because prompts show them, and closes it. From `prepare_resources` on,
each process has one connection to each server. A failing server raises an `InfrastructureError`, which masks the
sample; the next call connects again. A failing tool is an error message for the model.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar, Literal

from telescope.environments.arguments import refuse_unknown
from telescope.environments.tool_calls import ToolResult
from telescope.environments.tool_env import ToolEnvironment
from telescope.environments.tool_schema import Tool
from telescope.environments.user_code import error_text
from telescope.errors import InfrastructureError, UserError
from telescope.sandbox.base import run_sync

START_SECONDS = 60.0
"""Time for a server to start and to list its tools. `uvx` and `npx` may download it first."""


class McpTools(ToolEnvironment):
    """A mixin for a `ToolEnvironment`, whose `tools` may then contain `{mcp: "command or URL"}`.

    `include` beside it names the tools to take, by default all. A tool whose name is already taken gets the server's
    name as a prefix.
    """

    resources_per: ClassVar[Literal["host", "process"]] = "process"

    def __init__(self, tools: list[Any] | None = None, **kwargs: Any) -> None:
        made = [tool for tool in tools or () if not isinstance(tool, Mapping)]
        taken = {tool if isinstance(tool, str) else getattr(tool, "__name__", "") for tool in made}
        self._servers: list[Server] = []
        for spec in (tool for tool in tools or () if isinstance(tool, Mapping)):
            refuse_unknown(spec, {"mcp", "include"}, "A tool of an MCP server")
            if not isinstance(address := spec.get("mcp"), str) or not address.strip():
                raise UserError(f"The tool {dict(spec)!r} names no MCP server. Write mcp: COMMAND, or mcp: URL.")
            self._servers.append(server := Server(address))
            for tool in server.load_tools(spec.get("include"), taken):
                taken.add(tool.name)
                made.append(tool)
        super().__init__(tools=made, **kwargs)

    async def _wait_for(self, tool: Tool, result: Awaitable[Any]) -> ToolResult:
        if isinstance(tool, McpTool):
            await tool.server.client()  # restarting a server does not count as the tool's time
        return await super()._wait_for(tool, result)

    async def prepare_resources(self) -> None:
        """Connects to the servers."""
        await super().prepare_resources()
        await asyncio.gather(*(server.client() for server in self._servers))

    async def close_resources(self) -> None:
        """Closes the connections, which ends servers that were started here."""
        await asyncio.gather(*(server.close() for server in self._servers))
        await super().close_resources()


class McpTool(Tool):
    """A tool of an MCP server, which checks the arguments itself."""

    def __init__(self, server: Server, declared: Any, name: str) -> None:
        async def call(**arguments: Any) -> ToolResult:
            return await server.call(declared.name, arguments)

        call.__name__ = name
        super().__init__(call)
        self.server = server
        parameters = {"properties": {}, **declared.input_schema}
        self.schema["function"] |= {"description": declared.description or "", "parameters": parameters}


class Server:
    """An MCP server: a command to start here, or a URL."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._opened: asyncio.Future[Any] | None = None
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def load_tools(self, include: list[str] | None, taken: set[str]) -> list[McpTool]:
        """Lists the tools over a separate connection. Raises `UserError`."""

        async def load() -> tuple[str, dict[str, Any]]:
            try:
                client = await self.client()
                page = await client.list_tools()
                listed = list(page.tools)
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    listed += page.tools
                return client.server_info.name if client.server_info else "mcp", {tool.name: tool for tool in listed}
            finally:
                await self.close()

        try:
            prefix, known = run_sync(load())  # in another thread, because this one may run an event loop
        except Exception as error:
            raise UserError(f"{self._failure(error)}. Start it by hand to see why.") from error
        if not known:
            raise UserError(f"The MCP server {self.address!r} has no tools. Leave it out.")
        if missing := [name for name in include or () if name not in known]:
            raise UserError(f"The MCP server {self.address!r} has no tool {missing[0]!r}. It has: {', '.join(known)}.")
        names: dict[str, str] = {}  # of the server's names, ours
        for name in dict.fromkeys(include or known):
            plain, taken_here = _identifier(name), {*taken, *names.values()}
            tries = (plain, *(f"{_identifier(prefix)}{number}_{plain}" for number in ("", *range(2, 1000))))
            names[name] = next(candidate for candidate in tries if candidate not in taken_here)
        return [McpTool(self, known[name], unique) for name, unique in names.items()]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Calls a tool. Raises `InfrastructureError` when the server fails."""
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS

        client = await self.client()
        ended = self._ended  # of this connection: an earlier failure may have opened another one by the end of the call
        try:
            result = await client.call_tool(name, arguments)
        except Exception as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                return ToolResult("", str(error), success=False, error="argument_error")
            ended.set()  # the next call connects again
            raise self._failure(error) from error
        text = "\n".join(map(_block_text, result.content)) or json.dumps(result.structured_content)
        return ToolResult("", text, success=not result.is_error, error="tool_error" if result.is_error else None)

    async def client(self) -> Any:
        """Returns the connected client. Raises `InfrastructureError` if there is none after `START_SECONDS`."""
        if self._opened is None or self._ended.is_set():
            self._opened, self._ended = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._task = asyncio.create_task(self._keep_open(self._opened, self._ended))
        try:
            return await asyncio.wait_for(asyncio.shield(self._opened), START_SECONDS)
        except TimeoutError:
            await self.close()
            raise self._failure(f"it did not answer within {START_SECONDS:g} seconds") from None

    async def close(self) -> None:
        """Closes the connection."""
        self._ended.set()
        if self._task is not None:
            if self._opened is not None and not self._opened.done():
                self._task.cancel()
            await asyncio.wait({self._task})

    async def _keep_open(self, opened: asyncio.Future[Any], ended: asyncio.Event) -> None:
        """Keeps a connection open until it is `ended`. Enters and leaves the scopes of `mcp` in one task."""
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        server: Any = self.address
        try:
            if not self.address.startswith(("http://", "https://")):
                # The guard kills the server with its children when this process ends in any way.
                guard = ["-m", "telescope.utils.child_guard", str(os.getpid()), *shlex.split(self.address)]
                parameters = StdioServerParameters(command=sys.executable, args=guard, env=dict(os.environ))
                server = stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)
            async with Client(server) as client:
                opened.set_result(client)
                await ended.wait()
        except Exception as error:
            ended.set()
            if not opened.done():
                opened.set_exception(self._failure(error))

    def _failure(self, problem: BaseException | str) -> InfrastructureError:
        if isinstance(problem, InfrastructureError):
            return problem
        text = problem if isinstance(problem, str) else error_text(problem)
        return InfrastructureError(f"The MCP server {self.address!r} failed: {text}")


def _identifier(name: str) -> str:
    return re.sub(r"\W|^(?=\d)", "_", name)


def _block_text(block: Any) -> str:
    """Returns the text of a result block, or its type in brackets, such as `[image]`."""
    text = getattr(block, "text", None)
    return text if text is not None else getattr(getattr(block, "resource", None), "text", None) or f"[{block.type}]"
