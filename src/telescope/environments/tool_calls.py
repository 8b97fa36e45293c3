"""Reads tool calls from completions, in the forms of released models.

The system message shows the environment's form to the model; calls in every form are read:

- `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>` (Hermes, Qwen), the object alone, with `parameters`
  (Llama 3.1), and `<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>` (GLM)
- `<function=add><parameter=a>1</parameter></function>` (Qwen3-Coder, Qwen3.5), `<function=add>{"a": 1}</function>`,
  `<invoke name="add"><parameter name="a">1</parameter></invoke>` (MiniMax, DeepSeek 3.2)
- a name in other markup with JSON behind it (gpt-oss, Mistral, DeepSeek, Kimi: `_NAMED_OPENINGS`), or what Gemma 4
  writes in place of JSON, `<|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|>`
- `add(a=1, b="x")`, a Python call with literal arguments: anywhere in an answer with the form `function`, else only
  where an answer is nothing but calls (`[add(a=1)]`, Llama 3.2) or a marker announces them (`_MARKERS`)

JSON arguments may also be a list (by position) or a string of JSON.

Invariants, for any text:
- Reading never raises, and looks at most at `MAX_CALLS` calls of `MAX_CALL_CHARACTERS` characters.
- Markup inside of a JSON string, a Python string or a parameter is content.
- An attempted call that cannot be read becomes a call with an `error`, which is reported to the model; it is not
  dropped and does not count as an answer. Any trace of the markup, or of a known tool's name before a parenthesis,
  counts as an attempt.
- Calls inside reasoning do not count. A closing tag ends reasoning only if the answer or its prompt opened it.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from telescope.environments.call_values import (
    MAX_CALL_CHARACTERS,
    closing_bracket,
    decode,
    decode_gemma,
    text_behind,
    value_of_element,
)
from telescope.environments.parsers import END_OF_MESSAGE, REASONING_TAGS, ContinuedReasoning, UnfinishedReasoning

ToolCallFormat = Literal["xml", "function"]
Parameters = Mapping[str, Any]
"""The schemas of a tool's parameters, by name."""

MAX_CALLS = 64
"""Most calls that are read in one completion. A model in a loop writes thousands."""
MAX_UNCLOSED = 4
"""Calls without a closing parenthesis for which the rest of a completion is searched."""

_XML_OPEN, _XML_CLOSE = "<tool_call>", "</tool_call>"
NAMESPACE = r"(?:\uff5cDSML\uff5c|\w{1,16}:)?"
"""Namespace of the tags of some families."""
_TAG_OF_ELEMENTS = re.compile(r"<([^\s=<>]+)(?: name)?=")
"""The beginning of a call whose arguments are elements, and the name of its tag."""
_GEMMA_OPEN, _GEMMA_CLOSE = "<|tool_call>call:", "<tool_call|>"
_NAME = r"[^<>\s\[\](){}\"']"
_DEEPSEEK_CALL, _DEEPSEEK_NAME = r"<\uff5ctool\u2581call\u2581begin\uff5c>", r"<\uff5ctool\u2581sep\uff5c>"
_NAMED_OPENINGS = (
    rf"<function=({_NAME}{{0,200}})>",
    rf"<{NAMESPACE}invoke name=[\"']?({_NAME}{{0,200}})[\"']?>",
    rf"<\|tool_call>call:({_NAME}{{1,200}}+)",
    rf"to=functions\.({_NAME}{{1,200}}+)[^{{}}\[\]]{{0,100}}?<\|message\|>",
    rf"\[TOOL_CALLS\]({_NAME}{{1,200}})(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\]|(?=\{{)|\Z)",
    rf"{_DEEPSEEK_CALL}(?:function{_DEEPSEEK_NAME})?({_NAME}{{1,200}}+)(?:{_DEEPSEEK_NAME}|\s*```json)",
    rf"<\|tool_call_begin\|>(?:functions\.)?({_NAME}{{1,200}}?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
)
"""Markup with the name of a tool, before its arguments as JSON; after the first two as `<parameter ...>` elements."""
_MARKERS = (
    r"<\|python_(?:tag|start)\|>|\[TOOL_CALLS\]|<\|tool_call_start\|>|<\|tool_call\|>|<\|START_ACTION\|>"
    r"|<function_calls>|```tool_code"
)
"""Text that announces calls, which follow as JSON objects or in Python."""
_TOKEN = re.compile(
    rf"(?P<opens>{'|'.join(map(re.escape, REASONING_TAGS))})"
    r"|(?P<closes></think>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>)"
    rf"|(?P<tagged>{_XML_OPEN}(?!\s*<function=))"
    rf"|(?P<named>{'|'.join(_NAMED_OPENINGS)})"
    rf"|(?P<marker>{_MARKERS})"
    r'|(?P<json>\{\s*"(?:name|tool_name|type|function|id|tool_call_id|arguments|parameters)"\s*:)'
    r"|(?<![\w.])(?P<python>[A-Za-z_]\w{0,200}\()"
)
_KINDS = ("opens", "closes", "tagged", "named", "marker", "json", "python")
_KEYS_OF_A_CALL = frozenset(
    {"name", "arguments", "parameters", "id", "type", "index", "function", "tool_name", "tool_call_id"}
)
# If another closing tag follows before any element begins, the first one is part of a value.
_PARAMETER = re.compile(
    rf"\s*<{NAMESPACE}parameter(?:=(?P<name>[^<>\s]{{1,200}})|\ name=[\"']?(?P<named>[^<>\s\"']{{1,200}})[\"']?"
    rf"(?:\ string=\"(?P<is_text>\w+)\")?)>(?(name)\n?)(?P<value>.*?)(?(name)\n?)</{NAMESPACE}parameter>"
    rf"(?=\s*(?:<{NAMESPACE}parameter[=\ ]|</?{NAMESPACE}(?:function|invoke)|</?tool_call>|\Z))"
    rf"(?!(?:(?!<{NAMESPACE}parameter[=\ ]).)*?</{NAMESPACE}parameter>)",
    re.DOTALL,
)
_ARGUMENT = re.compile(
    r"\s*<arg_key>(?P<name>.{1,200}?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
    r"(?=\s*(?:<arg_key>|</?tool_call>|\Z))"
    r"(?!(?:(?!<arg_key>).)*?</arg_value>)",
    re.DOTALL,
)
_ANOTHER_OBJECT = re.compile(r"\s*[,;]?\s*(?=\{)")
_GLM_CALL = re.compile(rf"\s*(?!null|true|false|NaN|Inf)([A-Za-z_]{_NAME}{{0,200}})\s*(?=<arg_key>|{_XML_CLOSE})")
_TAG = r"(?:(?<!\w)<(?!\s)|</)[^<>\w]{0,3}"
"""The beginning of a tag, which may be damaged; no comparison (`n < pool_size`), no type (`vector<bool>`)."""
_FOREIGN = (
    rf"<function=|{_MARKERS}|</?tool_?calls?>|{_TAG}(?!param[\s>])[^<>\s]{{0,8}}(?:invo|nvok|voke|aram|amet)"
    r"|<\|tool_call>|to=functions\.|<\uff5ctool\u2581call"
)
_OBJECT = r"[\"']name[\"']\s*:.{0,200}(?:arguments|parameters)"
_TRACES = {
    "xml": re.compile(
        rf"{_TAG}(?:[^<>\s]{{0,8}}(?:too|ol_|l_c|_ca)|[^<>]{{0,8}}call[^<>\s]{{0,3}}>)"
        rf"|tool.?call\s{{0,3}}[<>{{\[=|]|[\"'](?:arguments|parameters)[\"']\s*:|{_OBJECT}|{_FOREIGN}",
        re.IGNORECASE,
    ),
    "function": re.compile(
        rf"{_TAG}(?!functional>|param[\s>])[^<>\s]{{0,8}}(?:fun|unc|nct|param|aram|amet)|tion=[^<>\s]{{0,200}}[>{{]"
        rf"|<[^<>\s]{{1,20}}=[^<>]{{1,100}}>|{_OBJECT}|{_FOREIGN}",
        re.IGNORECASE,
    ),
}
"""Pieces of the markup. At least one remains when some characters are missing or wrong. None of them occurs in ordinary
text: "the tool call gave 5", "no further tool_call.", "fraction=3" and `vector<bool>` are answers."""


@dataclass(slots=True)
class ToolCall:
    """One call. `arguments` is what the model wrote, not yet checked; `error` is why it cannot be read."""

    name: str
    arguments: Any
    raw_text: str = ""
    error: str | None = None

    def record(self, result: ToolResult, text: str) -> dict[str, Any]:
        """Returns the call as a row of `tool_calls`, without its position. `text` is the result that the model saw."""
        written = self.raw_text
        if self.error is None and not isinstance(self.arguments, str):
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                written = json.dumps(self.arguments, ensure_ascii=False, default=str)
        elif self.error is None:
            written = self.arguments
        return {
            "name": self.name,
            "arguments": written[:MAX_CALL_CHARACTERS],
            "result": text,
            "error": None if result.success else result.result[:MAX_CALL_CHARACTERS],
            "seconds": result.seconds,
        }


@dataclass(slots=True)
class ToolResult:
    """The outcome of a call. `result` is text: the tool's result, or the error message for the model.

    `error` is the kind of failure: `unknown_tool`, `argument_error`, `unreadable_call`, or the exception's name.
    `seconds` is how long the call took, and `value` the object that the tool returned; the environment fills them in.
    """

    tool_name: str
    result: str
    success: bool = True
    error: str | None = None
    seconds: float | None = None
    value: Any = None

    def __await__(self) -> Generator[Any, None, ToolResult]:
        """Returns itself, so that `await execute_tool(call)` works whether the tool is async or not."""
        return self
        yield  # makes this a generator


FORM_SHOWN: dict[str, str] = {
    "xml": '<tool_call>{"name": "...", "arguments": {...}}</tool_call>',
    "function": 'NAME(parameter=value, other="text")',
}
_FUNCTION_MARKUP = '<function=NAME>{"parameter": value}</function>'


def parse_calls(
    completion: str, form: ToolCallFormat, tools: Mapping[str, Parameters] | None = None, form_shown: str | None = None
) -> list[ToolCall]:
    """Returns all calls in order, including unreadable ones with their `error`. Empty if there are none.

    Only names in `tools` (None: all) are read as Python calls. The schemas of their parameters decide whether an
    element is text or JSON. `form_shown` is the form that the model was shown, if it differs from `form`'s.
    """
    if isinstance(completion, UnfinishedReasoning):
        return []
    return _calls_of(_Scan(completion, tools), form, form_shown)


def split_answer(completion: str, tools: Mapping[str, Parameters]) -> tuple[str, str, list[ToolCall]]:
    """Returns a completion's answer without reasoning, the reasoning, and the calls in the answer."""
    scan = _Scan(completion, tools)
    return scan.answer, "\n\n".join(scan.reasoning), _calls_of(scan, "xml", None)


def _calls_of(scan: _Scan, form: ToolCallFormat, form_shown: str | None) -> list[ToolCall]:
    calls = scan.marked
    if not calls:
        reads_python = form == "function" or scan.announced or not scan.rest.strip(" \n[],;")
        calls = [call for is_python, call in scan.bare if reads_python or not is_python]
    if calls and scan.num_left:
        calls = [*calls, ToolCall("", None, "", f"{scan.num_left} more calls were not read: at most {MAX_CALLS}.")]
    if not calls and (scan.announced or _TRACES[form].search(scan.rest)):
        shown = form_shown or FORM_SHOWN[form]
        calls = [ToolCall("", None, scan.text, f"A tool call must have the form {shown}.")]
    return calls


def parse_xml_tool_calls(text: str) -> list[ToolCall]:
    """Returns the readable `<tool_call>...</tool_call>` calls in order."""
    return [call for call in _Scan(text, None).marked if call.error is None]


def parse_function_call_syntax(text: str, tool_names: Collection[str] | None = None) -> list[ToolCall]:
    """Returns the calls `name(arg=1, other="x")` with literal arguments in order, limited to `tool_names` if given."""
    scan = _Scan(text, None if tool_names is None else {name: {} for name in tool_names})
    return [call for is_python, call in scan.bare if is_python and call.error is None]


class _Scan:
    """One pass over a completion. Collects its calls outside of reasoning, and the text around them."""

    def __init__(self, text: str, tools: Mapping[str, Parameters] | None) -> None:
        self.text = text
        self.tools = tools
        self.num_left = self._num_failed = self._num_unclosed = 0  # left: calls beyond the limits
        self._start_answer()
        self.reasoning: list[str] = []
        in_reasoning = isinstance(text, ContinuedReasoning)
        position = kept = 0
        while token := _TOKEN.search(text, position):
            kind = next(name for name in _KINDS if token[name] is not None)
            position = token.end()
            if kind in ("opens", "closes"):
                self._keep(text[kept : token.start()])
                kept = position
                if in_reasoning and REASONING_TAGS.get(token[0]) != END_OF_MESSAGE:  # a model may open it again
                    self._start_answer()
                    self.reasoning.append(text[: token.start()].strip())
                    in_reasoning = False
            if kind == "opens":
                end_tag = REASONING_TAGS[token[0]]
                closed = text.find(end_tag, position)
                self.reasoning.append(text[position : closed if closed != -1 else None].strip())
                kept = position = len(text) if closed == -1 else closed + len(end_tag)
            elif kind != "closes" and (end := self._read(kind, token)) is not None:
                self._keep(text[kept : token.start()])
                self.answer += text[token.start() : end]
                kept = position = end
        self._keep(text[kept:])

    def _start_answer(self) -> None:
        self.marked: list[ToolCall] = []
        """Calls in markup."""
        self.bare: list[tuple[bool, ToolCall]] = []
        """Calls without markup. The flag says whether the call is written in Python."""
        self.announced = False
        self.rest = self.answer = ""  # without reasoning; `rest` without calls too

    def _keep(self, text: str) -> None:
        self.rest += text
        self.answer += text

    def _read(self, kind: str, token: re.Match[str]) -> int | None:
        """Reads the call that begins with the token. Returns its end, or None if the token is ordinary text."""
        start, inside = token.span()
        if kind == "marker":
            self.announced = True
            return inside
        known = kind != "python" or self.tools is None or token[0][:-1] in self.tools
        num_tried = len(self.marked) + len(self.bare) + self._num_failed
        if num_tried >= MAX_CALLS or self._num_unclosed >= MAX_UNCLOSED:
            self.num_left += known and kind != "json" and (kind != "python" or self.tools is not None)
            return None
        if kind in ("tagged", "named"):
            if kind == "named":
                call, end = self._named(token[0], start, inside)
                self.marked.append(call)
            else:
                calls, end = self._tagged(start, inside)
                room = MAX_CALLS - num_tried
                self.marked += calls[:room]
                self.num_left += len(calls[room:])
            return end
        if kind == "json":
            value, end, problem = decode(self.text, start)
            if problem is None and _is_attempt(value, self.tools):
                self.bare.append((False, _read_object(value, self.text[start:end])))
                return end
            self._num_failed += problem is not None
            return None
        if not known:
            return None
        name = token[0][:-1]
        end = closing_bracket(self.text, inside)
        if end == -1:
            self._num_unclosed += 1
            call = ToolCall(name, None, self.text[start:], f"The call of {name} has no closing parenthesis.")
        else:
            call = _read_syntax(name, self.text[start:end])
        if call.error is not None and self.tools is None:  # the text may not be a call at all
            self._num_failed += 1
            return None
        self.bare.append((True, call))
        return max(end, inside)

    def _tagged(self, start: int, inside: int) -> tuple[list[ToolCall], int]:
        """Returns the calls after `<tool_call>`, and their end. A call that only lacks its closing tag is read."""
        problem = None
        value: Any
        glm = _GLM_CALL.match(self.text, inside)
        if glm and (self.text.startswith("<arg_key>", glm.end()) or glm[1] in (self.tools or ())):
            arguments, end = self._elements(_ARGUMENT, glm[1], glm.end())
            value = {"name": glm[1], "arguments": arguments}
        else:
            value, end, problem = decode(self.text, inside)
        values = value if isinstance(value, list) and value and all(isinstance(v, dict) for v in value) else [value]
        while isinstance(value, dict) and len(values) < MAX_CALLS and _ANOTHER_OBJECT.match(self.text, end):
            following, end, problem = decode(self.text, self.text.index("{", end))
            if problem:
                break
            values.append(following)
        limit, stop = self._limit(end, _XML_OPEN, _XML_CLOSE)
        problem = problem or text_behind(self.text[end:limit])
        raw = self.text[start:stop]
        if problem is None:
            return [_read_object(value, raw) for value in values], stop
        lacks = "" if stop > limit else f" The closing {_XML_CLOSE} is missing."
        return [ToolCall("", None, raw, f"The tool call is not valid JSON: {problem}.{lacks}")], end

    def _named(self, opening: str, start: int, inside: int) -> tuple[ToolCall, int]:
        """Returns the call after one of `_NAMED_OPENINGS`, and its end."""
        text = self.text
        name = next(found[1] for pattern in _NAMED_OPENINGS if (found := re.fullmatch(pattern, opening)))
        if not name:
            return ToolCall("", None, opening, f"A tool call must name its function: {_FUNCTION_MARKUP}."), inside
        tag = _TAG_OF_ELEMENTS.match(opening)
        closing = f"</{tag[1]}>" if tag else _GEMMA_CLOSE
        body = len(text) - len(text[inside:].lstrip())
        value: Any = {}
        problem, end = None, body
        if tag and re.match(f"<{NAMESPACE}parameter", text[body : body + 40]):
            value, end = self._elements(_PARAMETER, name, body)
            if end == body:
                problem = f"A parameter of {name} must be written <parameter=NAME>value</parameter>"
        elif not (tag and (body == len(text) or text.startswith((closing, _XML_CLOSE), body))):
            value, end, problem = decode_gemma(text, body) if opening.startswith(_GEMMA_OPEN) else decode(text, body)
            problem = problem and f"The arguments of {name} are not valid JSON: {problem}"
        if tag or text.startswith(closing, end):
            limit, stop = self._limit(end, tag[0] if tag else _GEMMA_OPEN, closing)
        else:
            limit = stop = end
        if problem is None and (behind := text_behind(text[end:limit].replace(_XML_CLOSE, "").replace(_XML_OPEN, ""))):
            problem = f"The arguments of {name} cannot be read: {behind}"
        raw = text[start:stop]
        if problem is None:
            return ToolCall(name, value, raw, _arguments_problem(value)), stop
        lacks = "" if stop > limit or not tag else f" The closing {closing} is missing."
        return ToolCall(name, None, raw, f"{problem}.{lacks}"), end

    def _elements(self, element: re.Pattern[str], name: str, position: int) -> tuple[dict[str, Any], int]:
        """Returns the arguments that are written as elements, and their end."""
        schemas = (self.tools or {}).get(name, {})
        arguments: dict[str, Any] = {}
        while found := element.match(self.text, position, position + MAX_CALL_CHARACTERS):
            written = found.groupdict()
            argument = written["name"] or written["named"]
            schema = {"type": "string"} if written.get("is_text") == "true" else schemas.get(argument, {})
            arguments[argument] = value_of_element(written["value"], schema)
            position = found.end()
        return arguments, position

    def _limit(self, position: int, opening: str, closing: str) -> tuple[int, int]:
        """Returns where the content of an element ends, and where the text after the element begins."""
        close, again = self.text.find(closing, position), self.text.find(opening, position)
        if close != -1 and not -1 < again < close:
            return close, close + len(closing)
        return (again, again) if again != -1 else (len(self.text), len(self.text))


def _is_attempt(value: Any, tools: Collection[str] | None) -> bool:
    """Returns whether a JSON object without markup is a call. An object may also be an ordinary answer."""
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = _name_in(value)
    return isinstance(name, str) and (bool({"arguments", "parameters"} & value.keys()) or name in (tools or ()))


def _name_in(value: Mapping[str, Any]) -> Any:
    return next((value[key] for key in ("name", "tool_name", "function") if key in value), None)


def _read_object(value: Any, raw: str) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall(
            "", None, raw, f"A tool call must be a JSON object, not {_KIND[type(value)]}: {FORM_SHOWN['xml']}."
        )
    inner = value.get("function")
    if "name" not in value and isinstance(inner, dict):  # as OpenAI's API nests it
        value = inner
    name = _name_in(value)
    if not isinstance(name, str) or not name:
        return ToolCall("", None, raw, 'A tool call must have a "name" that is a string.')
    arguments = value.get("arguments", value.get("parameters", {}))
    stray = ", ".join(repr(key[:40]) for key in value if key not in _KEYS_OF_A_CALL)
    if stray:  # ignoring them would run the tool with default values
        return ToolCall(name, arguments, raw, f'A tool call has no {stray}: its parameters stand in "arguments".')
    return ToolCall(name, arguments, raw, _arguments_problem(arguments))


def _arguments_problem(arguments: Any) -> str | None:
    if arguments is None or isinstance(arguments, dict | list | str):
        return None
    return f'"arguments" must be a JSON object, not {_KIND[type(arguments)]}.'


_KIND = {
    bool: "a truth value", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object",
    type(None): "null",
}  # fmt: skip


def _read_syntax(name: str, raw: str) -> ToolCall:
    form = f"write it as {name}(parameter=value) with literal values"
    try:
        call = ast.parse(raw, mode="eval").body
        assert isinstance(call, ast.Call)
        positional = [ast.literal_eval(value) for value in call.args]
        named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
        if len(named) < len(call.keywords) or (positional and named):
            return ToolCall(name, None, raw, f"The call of {name} cannot be read: {form}.")
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, AssertionError) as error:
        return ToolCall(name, None, raw, f"The call of {name} cannot be read ({type(error).__name__}): {form}.")
    return ToolCall(name, positional or named, raw)


def written_call(name: str, **arguments: Any) -> str:
    """Returns a call in a form that every environment with tools reads."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def as_text(value: Any) -> str:
    """Returns `str(value)`, or a note with its type if that raises."""
    try:
        return str(value)
    except Exception:  # a number with too many digits, a `__str__` that raises
        return f"a result of type {type(value).__name__} that cannot be written as text"
