"""Environments in which the model may call Python functions.

`ToolEnvironment` shows the model its tools, runs the calls in each answer and responds with their results. An answer
without a call is the final one and ends the rollout. This module owns the conversation; `tool_calls` reads calls,
`tool_schema` checks arguments, and the subclass computes the reward.

Invariants:
- Every call gets a response. A call that is broken, names no tool, has wrong arguments, raises or takes too long gets
  an error message for the model. Only a tool's `InfrastructureError` propagates, because it is not the model's fault.
- An environment keeps no state of a rollout. Calls and results are counted in `state.custom`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar, Literal

from telescope.environments.base import (
    DEFAULT_TURNS,
    ChatMessage,
    MultiTurnEnvironment,
    RewardResult,
    RolloutState,
    Sample,
)
from telescope.environments.tool_calls import (
    FORM_SHOWN,
    ToolCall,
    ToolCallFormat,
    ToolResult,
    as_text,
    parse_calls,
    parse_function_call_syntax,
    parse_xml_tool_calls,
)
from telescope.environments.tool_schema import ArgumentError, Tool, func_to_tool_schema
from telescope.environments.tool_template import ToolTemplate, tool_template
from telescope.environments.user_code import DeadlinePassed, deadline, gather_or_cancel, maybe_await, within
from telescope.errors import InfrastructureError, UserError
from telescope.utils.process import Terminated

__all__ = [
    "ToolCall", "ToolEnvironment", "ToolResult", "func_to_tool_schema", "parse_function_call_syntax",
    "parse_xml_tool_calls",
]  # fmt: skip

SANDBOX_KEY = "sandbox"
"""Key of `state.custom` with the handle of the rollout's sandbox, which the record of a tool call names."""

TOOL_RESULT = "tool_result"
"""The `turn_type` of messages with results."""

_state: ContextVar[RolloutState | None] = ContextVar("tool_state", default=None)
"""The rollout whose calls are running, for tools that take the state."""


class ToolEnvironment(MultiTurnEnvironment):
    """A conversation with tools. Subclasses define `load_dataset` and `compute_reward(state)`.

    `tools` are plain or async functions, with annotations and docstrings; a parameter annotated with `RolloutState`
    receives the state. With `include_tool_schemas_in_prompt` the prompt lists them: through the chat template if it
    takes tools (`tool_template`), or else by the end of the system message. `error_formatter` turns a tool's exception
    into the text that the model reads.

    `tool_map` maps names to functions, `tool_schemas` has OpenAI schemas. `state.custom` has `tool_calls` (dictionaries
    with name, arguments and raw text), `tool_results` (with name, result, success and error), `tool_success_count`,
    `tool_error_count` and `tools_by_name` (number of calls of each tool). The record names the sandbox whose handle an
    environment keeps in `sandbox` there.

    Class attributes: `tool_timeout_seconds` limits one call; `max_result_characters` cuts long results; `tool_role` is
    the role of the responses ("user": one message for all results of a turn; "tool": one message per result, in the
    tool role of the chat template; None: "tool" where the tools go through the template); `tools_in_template` False
    keeps them in the system message. None keeps them there for a class with its own prompt, syntax or parser.
    """

    tool_timeout_seconds: float = 30.0
    tool_role: ClassVar[Literal["tool", "user"] | None] = None
    tools_in_template: ClassVar[bool | None] = None
    max_result_characters: int = 16_000

    def __init__(
        self,
        tools: list[Callable[..., Any] | Tool] | None = None,
        max_turns: int = DEFAULT_TURNS,
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
        self.tools = list(tools or ())
        self._tools: dict[str, Tool] = {}
        for function in self.tools:
            if isinstance(function, str | dict):
                mixin = "SandboxTools" if isinstance(function, str) else "McpTools"
                raise UserError(
                    f"{type(self).__name__} has no tool {function!r}: give a function, or put {mixin} before "
                    "ToolEnvironment in its bases (docs/tools.md)."
                )
            tool = function if isinstance(function, Tool) else Tool(function)
            if tool.name in self._tools:
                raise UserError(f"{type(self).__name__} has two tools named {tool.name!r}.")
            self._tools[tool.name] = tool
        self.tool_map = {name: tool.function for name, tool in self._tools.items()}
        self.tool_schemas = [tool.schema for tool in self._tools.values()]
        self._parameters = {
            name: tool.schema["function"]["parameters"]["properties"] for name, tool in self._tools.items()
        }

        self._template: ToolTemplate | None = None
        """The chat template, if the tools go through it."""
        self._tools_section = self._build_tools_prompt_section() if include_tool_schemas_in_prompt and tools else ""
        if self._tools_section:
            self.system_prompt = "\n\n".join(filter(None, (self.system_prompt, self._tools_section)))

    # The conversation

    def create_initial_state(self, sample: Sample) -> RolloutState:
        state = super().create_initial_state(sample)
        _counts(state)
        return state

    def get_initial_prompt(self, sample: Sample, tokenizer: Any = None) -> list[ChatMessage]:
        messages = super().get_initial_prompt(sample, tokenizer)
        if not self._tools_section:
            return messages
        asks_for_section = self.tool_call_format != "xml" or self._overrides(
            "get_initial_prompt", "_build_tools_prompt_section", "parse_tool_calls"
        )
        in_template = not asks_for_section if self.tools_in_template is None else self.tools_in_template
        self._template = tool_template(tokenizer) if in_template else None
        self.template_tools = self.tool_schemas if self._template else None
        system = (
            messages.pop(0) if messages and messages[0].get("role") == "system" else {"role": "system", "content": ""}
        )
        text = str(system["content"]).removesuffix(self._tools_section).rstrip()
        if self._template is None:
            text = f"{text}\n\n{self._tools_section}" if text else self._tools_section
        return [{**system, "content": text}, *messages] if text else messages

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(ToolEnvironment, name) for name in names)

    @property
    def form_of_a_call(self) -> str:
        return self._template.form if self._template else FORM_SHOWN[self.tool_call_format]

    @property
    def reply_role(self) -> str:
        """Returns the role of messages with results."""
        in_template = self._template is not None and self._template.takes_results
        keeps = in_template and not self._overrides("env_response", "format_multiple_tool_results")
        return self.tool_role or ("tool" if keeps else "user")

    def _build_tools_prompt_section(self) -> str:
        """Returns the part of the system message that describes the tools. May be overridden."""
        schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self.tool_schemas)
        return (
            f"You may call these tools:\n<tools>\n{schemas}\n</tools>\n\nTo call one, write\n"
            f"{FORM_SHOWN[self.tool_call_format]}\nSeveral calls may follow one another. The results come in the next "
            "message. Without a call, your message is your final answer."
        )

    def env_response(
        self, messages: list[ChatMessage], state: RolloutState
    ) -> list[ChatMessage] | Awaitable[list[ChatMessage]]:
        """Runs the calls of the last answer in order. Returns their results as messages."""
        token = _state.set(state)
        try:
            calls = self.parse_tool_calls(state.trajectory[-1].text)
            results = [self._run(call) for call in calls]
        finally:
            _state.reset(token)
        settled = [result for result in results if isinstance(result, ToolResult)]
        if len(settled) == len(results):
            return self._respond(calls, settled, state)
        return self._respond_later(calls, results, state)

    def is_done(self, state: RolloutState) -> tuple[bool, str | None]:
        """Returns whether the rollout has ended, with a final answer or after `max_turns`."""
        if state.trajectory and self.is_final_answer(state.trajectory[-1].text, state):
            return True, "final_answer"
        return super().is_done(state)

    # What subclasses may override

    def parse_tool_calls(self, completion: str) -> list[ToolCall]:
        """Returns the calls in an answer. Unreadable calls have an `error`."""
        return parse_calls(completion, self.tool_call_format, self._parameters, self.form_of_a_call)

    def is_final_answer(self, completion: str, state: RolloutState) -> bool:
        """Returns whether the answer ends the rollout, by default if it has no call, readable or not."""
        return not self.parse_tool_calls(completion)

    def execute_tool(self, call: ToolCall) -> ToolResult | Awaitable[ToolResult]:
        """Runs one call. A plain or async method may override it; `await super().execute_tool(call)` works."""
        if call.error is not None:
            return ToolResult(call.name, call.error, success=False, error="unreadable_call")
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            text = f"there is no tool {call.name[:100]!r}. The tools are: {known}."
            return ToolResult(call.name[:100], text, success=False, error="unknown_tool")
        try:
            bound = tool.bind(call.arguments, _state.get())
        except (ArgumentError, RecursionError) as error:
            return ToolResult(tool.name, str(error), success=False, error="argument_error")
        try:
            with deadline(self.tool_timeout_seconds):
                result = tool.function(*bound.args, **bound.kwargs)
        except (Exception, SystemExit) as error:
            return self._failure(tool.name, error)
        if isinstance(result, ToolResult):
            return result
        if inspect.isawaitable(result):
            return self._wait_for(tool, result)
        return ToolResult(tool.name, as_text(result), value=result)

    def format_tool_result(self, result: ToolResult) -> str:
        """Returns the text of one result: `[name] result` or `[name] Error: ...`. The tool role needs no name."""
        text = result.result if result.success else f"Error: {result.result}"
        if len(text) > self.max_result_characters:
            text = f"{text[: self.max_result_characters]}... ({len(text)} characters in all)"
        return f"[{result.tool_name}] {text}" if self.reply_role == "user" and result.tool_name else text

    def format_multiple_tool_results(self, results: Sequence[ToolResult]) -> str:
        """Returns the text of several results, in lines `Tool 1: ...`."""
        return "\n".join(f"Tool {i}: {self.format_tool_result(result)}" for i, result in enumerate(results, 1))

    def get_tool_metrics(self, state: RolloutState) -> dict[str, float]:
        """Returns numbers of a rollout's calls, with `<tool>_calls` for every tool and called name."""
        custom = _counts(state)
        total = custom["tool_success_count"] + custom["tool_error_count"]
        called = dict.fromkeys(self.tool_map, 0) | custom["tools_by_name"]
        return {
            "total_tool_calls": total,
            "tool_success_count": custom["tool_success_count"],
            "tool_error_count": custom["tool_error_count"],
            "tool_success_rate": custom["tool_success_count"] / total if total else 0.0,
            "unique_tools_used": len(custom["tools_by_name"]),
            **{f"{name}_calls": count for name, count in called.items()},
        }

    # Running

    def _run(self, call: ToolCall) -> ToolResult | Awaitable[ToolResult]:
        started_at = time.perf_counter()
        try:
            result = self.execute_tool(call)
        except (Exception, SystemExit) as error:
            result = self._failed_call(call, error)
        if not isinstance(result, ToolResult):
            return self._settled(call, result)
        result.seconds = time.perf_counter() - started_at
        return result

    async def _respond_later(
        self, calls: list[ToolCall], pending: list[ToolResult | Awaitable[ToolResult]], state: RolloutState
    ) -> list[ChatMessage]:
        """Awaits all async calls together."""
        token = _state.set(state)
        try:
            results = await gather_or_cancel(map(maybe_await, pending))
        finally:
            _state.reset(token)
        return self._respond(calls, results, state)

    async def _settled(self, call: ToolCall, pending: Awaitable[ToolResult]) -> ToolResult:
        started_at = time.perf_counter()
        try:
            result = await pending
        except (Exception, SystemExit) as error:
            result = self._failed_call(call, error)
        result.seconds = time.perf_counter() - started_at
        return result

    async def _wait_for(self, tool: Tool, result: Awaitable[Any]) -> ToolResult:
        try:
            value = await within(self.tool_timeout_seconds, result)
        except (Exception, SystemExit) as error:
            return self._failure(tool.name, error)
        return value if isinstance(value, ToolResult) else ToolResult(tool.name, as_text(value), value=value)

    def _failed_call(self, call: ToolCall, error: BaseException) -> ToolResult:
        """Returns the result of a call that raised. Records the call if its error masks the sample."""
        if isinstance(error, InfrastructureError):
            lost = ToolResult(call.name, str(error), success=False, error=type(error).__name__)
            self._record(call, lost, _state.get())
        return self._failure(call.name, error)

    def _failure(self, name: str, error: BaseException) -> ToolResult:
        """Returns the result of a call that raised. Re-raises errors that are not the model's fault."""
        if isinstance(error, InfrastructureError | Terminated):
            raise error
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, DeadlinePassed):
            text = f"{name or 'the call'} did not end within {error.seconds:g} seconds."
        elif isinstance(error, SystemExit):
            text = f"{name} tried to end the process."
        elif self.error_formatter is not None and isinstance(error, Exception):
            with contextlib.suppress(Exception):  # a formatter that fails must not fail the rollout
                text = str(self.error_formatter(error))
        return ToolResult(name, text, success=False, error=type(error).__name__)

    def _record(self, call: ToolCall, result: ToolResult, state: RolloutState | None) -> None:
        if state is not None:
            record = call.record(result, self.format_tool_result(result))
            state.tool_records.append(record | {"sandbox": getattr(state.custom.get(SANDBOX_KEY), "id", None)})

    def _respond(self, calls: list[ToolCall], results: Sequence[ToolResult], state: RolloutState) -> list[ChatMessage]:
        custom = _counts(state)
        for call, result in zip(calls, results, strict=True):
            result.tool_name = name = result.tool_name or call.name[:100]
            if not isinstance(result.result, str):  # an override may return any value
                result.value = result.result
                result.result = as_text(result.error if result.result is None else result.result)
            custom["tool_calls"].append({"name": call.name, "arguments": call.arguments, "raw": call.raw_text})
            custom["tool_results"].append(
                {"name": name, "result": result.result, "success": bool(result.success), "error": result.error}
            )
            custom["tool_success_count" if result.success else "tool_error_count"] += 1
            self._record(call, result, state)
            if name:
                custom["tools_by_name"][name] = custom["tools_by_name"].get(name, 0) + 1
        if self.reply_role == "tool":
            named = [{"name": result.tool_name} if result.tool_name else {} for result in results]
            texts = map(self.format_tool_result, results)
            common = {"role": "tool", "turn_type": TOOL_RESULT}
            return _Response({**common, "content": text, **name} for text, name in zip(texts, named, strict=True))
        if not results:
            return _Response()
        text = self.format_tool_result(results[0]) if len(results) == 1 else self.format_multiple_tool_results(results)
        return _Response([{"role": "user", "content": text, "turn_type": TOOL_RESULT}])


class _Response(list[ChatMessage]):
    """Messages that an override may `await`: `await super().env_response(messages, state)` works with plain tools."""

    def __await__(self) -> Generator[Any, None, list[ChatMessage]]:
        return self
        yield  # makes this a generator


class SingleTurnTools(ToolEnvironment):
    """A mixin that gives a `SingleTurnEnvironment` tools. The last answer is scored."""

    tools_in_template = True

    def get_initial_prompt(self, sample: Sample, tokenizer: Any = None) -> list[ChatMessage]:
        messages = self.build_messages(sample.prompt)  # type: ignore[attr-defined]  # of the single-turn environment
        return super().get_initial_prompt(replace(sample, prompt=messages), tokenizer)

    async def compute_reward(self, state: RolloutState, eos_token: str = "") -> RewardResult:
        score = super(MultiTurnEnvironment, self).compute_reward  # type: ignore[misc]
        result: RewardResult = await maybe_await(score(state.trajectory[-1].text, state.sample, eos_token))
        result.sample_metrics |= self.get_tool_metrics(state)
        return result


def _counts(state: RolloutState) -> dict[str, Any]:
    """Returns `state.custom` with the entries that a tool environment keeps there."""
    empty = {"tool_calls": [], "tool_results": [], "tool_success_count": 0, "tool_error_count": 0, "tools_by_name": {}}
    for key, value in empty.items():
        state.custom.setdefault(key, value)
    return state.custom
