"""Environments in which the model may call Python functions.

`ToolEnvironment` shows the model its tools, finds the calls in each answer, runs them and replies with what they came
to. An answer without a call is the final one and ends the rollout. It owns the conversation; what a call looks like is
`tool_calls`'s matter, how arguments are checked is `tool_schema`'s, the reward is the subclass's.

Invariants:
- Whatever the model writes, there is a reply: a call that is broken, names no tool, has wrong arguments, raises or
  takes too long becomes an observation for the model. Only a tool's `InfrastructureError` goes up: that is not the
  model's doing.
- Nothing about a rollout is kept on the environment; what tools did is counted in `state.custom["tool_results"]`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Literal

from telescope.environments.base import ChatMessage, MultiTurnEnvironment, RolloutState, Sample
from telescope.environments.tool_calls import FORM_SHOWN, ToolCall, ToolCallFormat, ToolResult, as_text, parse_calls
from telescope.environments.tool_schema import ArgumentError, Tool, func_to_tool_schema
from telescope.environments.user_code import DeadlinePassed, deadline, within
from telescope.errors import InfrastructureError, UserError

__all__ = ["ToolCall", "ToolEnvironment", "ToolResult", "func_to_tool_schema"]

RESULTS_KEY = "tool_results"
"""Where `state.custom` keeps one `(tool name, success)` for every call; the name is empty for a call of no tool."""

_state: ContextVar[RolloutState | None] = ContextVar("tool_state", default=None)
"""The rollout whose calls are being run, for tools that ask for it."""


class ToolEnvironment(MultiTurnEnvironment):
    """A conversation with tools. Subclasses give `load_dataset` and `compute_reward(state)`.

    `tools` are plain or async functions, with annotations and docstrings; one that annotates a parameter with
    `RolloutState` is given the state. With `include_tool_schemas_in_prompt` the system message ends with the schemas
    and the form of a call. `error_formatter` turns a tool's exception into the text that the model reads.

    Class attributes: `tool_timeout_seconds` bounds one call; `tool_role` is the role of the replies ("user" joins all
    replies of a turn to one message, for templates that know no other role); `max_result_characters` cuts long results.
    """

    tool_timeout_seconds: float = 30.0
    tool_role: ClassVar[Literal["tool", "user"]] = "tool"
    max_result_characters: int = 16_000

    def __init__(
        self,
        tools: list[Callable[..., Any]] | None = None,
        max_turns: int = 10,
        tool_call_format: ToolCallFormat = "xml",
        include_tool_schemas_in_prompt: bool = True,
        error_formatter: Callable[[Exception], str] | None = None,
        system_prompt: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, system_prompt=system_prompt, **kwargs)
        if tool_call_format not in FORM_SHOWN:
            raise UserError(f"{type(self).__name__}: tool_call_format is {tool_call_format!r}; use xml or function.")
        self.tool_call_format: ToolCallFormat = tool_call_format
        self.include_tool_schemas_in_prompt = include_tool_schemas_in_prompt
        self.error_formatter = error_formatter
        self.tools: dict[str, Tool] = {}
        for function in tools or ():
            tool = Tool(function)
            if tool.name in self.tools:
                raise UserError(f"{type(self).__name__} has two tools that are called {tool.name!r}.")
            self.tools[tool.name] = tool

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """OpenAI schemas of all tools."""
        return [tool.schema for tool in self.tools.values()]

    # The conversation

    def get_initial_prompt(self, sample: Sample, tokenizer: Any = None) -> list[ChatMessage]:
        messages = super().get_initial_prompt(sample, tokenizer)
        if not (self.include_tool_schemas_in_prompt and self.tools):
            return messages
        if messages and messages[0].get("role") == "system":
            first = f"{messages[0]['content']}\n\n{self.describe_tools()}"
            return [{**messages[0], "content": first}, *messages[1:]]
        return [{"role": "system", "content": self.describe_tools()}, *messages]

    def describe_tools(self) -> str:
        """What the system message says of the tools. Override it for other words."""
        schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self.tool_schemas)
        return (
            f"You may call these tools:\n<tools>\n{schemas}\n</tools>\n\nTo call one, write\n"
            f"{FORM_SHOWN[self.tool_call_format]}\nSeveral calls may follow one another. The results come in the next "
            "message. Without a call, your message is your final answer."
        )

    def env_response(
        self, messages: list[ChatMessage], state: RolloutState
    ) -> list[ChatMessage] | Awaitable[list[ChatMessage]]:
        """Run the calls of the last answer and reply with their results, in order."""
        token = _state.set(state)
        try:
            calls = self.parse_tool_calls(state.trajectory[-1].completion)
            results = [self._run(call) for call in calls]
        finally:
            _state.reset(token)
        settled = [result for result in results if isinstance(result, ToolResult)]
        if len(settled) == len(results):
            return self._reply(calls, settled, state)
        return self._reply_later(calls, results, state)

    def is_done(self, state: RolloutState) -> tuple[bool, str | None]:
        """Done with a final answer, or when the turns are used up."""
        if state.trajectory and self.is_final_answer(state.trajectory[-1].completion, state):
            return True, "final_answer"
        return super().is_done(state)

    # What subclasses may override

    def parse_tool_calls(self, completion: str) -> list[ToolCall]:
        """The calls in an answer; unreadable ones with their `error`."""
        return parse_calls(completion, self.tool_call_format)

    def is_final_answer(self, completion: str, state: RolloutState) -> bool:
        """Whether the answer ends the rollout: unless overridden, when nothing in it was meant as a call."""
        return not self.parse_tool_calls(completion)

    def execute_tool(self, call: ToolCall) -> ToolResult | Awaitable[ToolResult]:
        """Run one call. May be overridden by a plain or an async method; `await super().execute_tool(call)` works."""
        if call.error is not None:
            return ToolResult(call.name, None, success=False, error=call.error)
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return ToolResult(
                "", None, success=False, error=f"there is no tool {call.name[:100]!r}. The tools are: {known}."
            )
        try:
            bound = tool.bind(call.arguments, _state.get())
        except (ArgumentError, RecursionError) as error:
            return ToolResult(tool.name, None, success=False, error=str(error))
        try:
            with deadline(self.tool_timeout_seconds):
                result = tool.function(*bound.args, **bound.kwargs)
        except (Exception, SystemExit) as error:
            return self._failed(tool, error)
        if isinstance(result, ToolResult):
            return result
        if inspect.isawaitable(result):
            return self._wait_for(tool, result)
        return ToolResult(tool.name, result)

    def format_tool_result(self, result: ToolResult) -> str:
        """The text of a reply."""
        text = f"Error: {result.error}" if not result.success else as_text(result.result)
        if len(text) > self.max_result_characters:
            text = f"{text[: self.max_result_characters]}... ({len(text)} characters in all)"
        return text

    def get_tool_metrics(self, state: RolloutState) -> dict[str, float]:
        """Numbers of a rollout's calls, for `sample_metrics`; `<tool>_calls` for every tool, called or not."""
        results: Sequence[tuple[str, bool]] = state.custom.get(RESULTS_KEY, ())
        successes = sum(success for _, success in results)
        counts = {name: sum(called == name for called, _ in results) for name in self.tools}
        return {
            "total_tool_calls": float(len(results)),
            "tool_success_count": float(successes),
            "tool_error_count": float(len(results) - successes),
            "tool_success_rate": successes / len(results) if results else 0.0,
            "unique_tools_used": float(sum(count > 0 for count in counts.values())),
            **{f"{name}_calls": float(count) for name, count in counts.items()},
        }

    # Running

    def _run(self, call: ToolCall) -> ToolResult | Awaitable[ToolResult]:
        try:
            return self.execute_tool(call)
        except InfrastructureError:
            raise
        except (Exception, SystemExit) as error:  # of a method that was overridden
            return self._error_result(call.name, error)

    async def _reply_later(
        self, calls: list[ToolCall], pending: list[ToolResult | Awaitable[ToolResult]], state: RolloutState
    ) -> list[ChatMessage]:
        """Wait for all async calls together."""
        token = _state.set(state)
        try:
            results = await asyncio.gather(
                *(self._settled(call, result) for call, result in zip(calls, pending, strict=True))
            )
        finally:
            _state.reset(token)
        return self._reply(calls, results, state)

    async def _settled(self, call: ToolCall, result: ToolResult | Awaitable[ToolResult]) -> ToolResult:
        try:
            return await result
        except InfrastructureError:
            raise
        except (Exception, SystemExit) as error:
            return self._error_result(call.name, error)

    async def _wait_for(self, tool: Tool, result: Awaitable[Any]) -> ToolResult:
        try:
            return ToolResult(tool.name, await within(self.tool_timeout_seconds, result))
        except (Exception, SystemExit) as error:
            return self._failed(tool, error)

    def _failed(self, tool: Tool, error: BaseException) -> ToolResult:
        if isinstance(error, InfrastructureError):
            raise error
        return self._error_result(tool.name, error)

    def _error_result(self, name: str, error: BaseException) -> ToolResult:
        if isinstance(error, DeadlinePassed):
            text = f"{name or 'the call'} did not end within {error.seconds:g} seconds."
        elif isinstance(error, SystemExit):
            text = f"{name} tried to end the process."
        else:
            text = self._formatted(error)
        return ToolResult(name if name in self.tools else "", None, success=False, error=text)

    def _formatted(self, error: BaseException) -> str:
        plain = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if self.error_formatter is None or not isinstance(error, Exception):
            return plain
        try:
            return str(self.error_formatter(error))
        except Exception:
            return plain  # a formatter that fails must not cost the rollout

    def _reply(self, calls: list[ToolCall], results: Sequence[ToolResult], state: RolloutState) -> list[ChatMessage]:
        history = state.custom.setdefault(RESULTS_KEY, [])
        history.extend((r.tool_name if r.tool_name in self.tools else "", bool(r.success)) for r in results)
        texts = [self.format_tool_result(result) for result in results]
        if self.tool_role == "user":
            wrapped = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)
            return [{"role": "user", "content": wrapped}]
        names = [result.tool_name or call.name for call, result in zip(calls, results, strict=True)]
        return [
            {"role": "tool", "content": text, **({"name": name[:100]} if name else {})}
            for name, text in zip(names, texts, strict=True)
        ]
