"""Describes Python functions as tools: builds schemas, and checks and converts the arguments of calls.

Schema and checks come from one pydantic model that is built from the annotations, so a call accepts exactly what the
schema promises. A fault of the function (an annotation that JSON cannot express) is a `UserError` when the tool is
created. A fault of the model is an `ArgumentError`, whose text is sent to the model.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import types
import typing
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired, Optional, Required, Union

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict

from telescope.environments.records import RolloutState
from telescope.errors import UserError

MAX_ERRORS_SHOWN = 5
"""Most errors reported for one call."""

_KINDS = inspect.Parameter


class ArgumentError(ValueError):
    """The model's arguments do not fit the tool. The message is for the model."""


class Tool:
    """A function with its schema.

    A parameter annotated with `RolloutState` is not in the schema; it receives the rollout's state.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name: str = getattr(function, "__name__", "")
        if not self.name.isidentifier():
            raise UserError(f"{function!r} cannot be a tool: it has no name. Use a function that is defined with def.")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UserError(f"The tool {self.name!r} yields its results. Return them instead, for example as one text.")
        self.parameters, self.state_parameter = _shown_parameters(function, self.name)
        self._fields: dict[str, str] = {}
        description, described = _read_docstring(inspect.getdoc(function) or "")
        try:
            self._model = self._build_model(described)
            parameters = self._model.model_json_schema(by_alias=True)
        except (PydanticUserError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"The tool {self.name!r} has a parameter that JSON cannot express ({reason}). Annotate it with a plain "
                "type: str, int, float, bool, list, dict, Literal, Optional, an Enum, a dataclass or a pydantic model."
            ) from error
        parameters = _inlined(parameters, parameters.pop("$defs", {}), ())
        if parameters.get("additionalProperties") is False:
            del parameters["additionalProperties"]  # useless to a model, and costs tokens in every prompt
        schema = {"name": self.name, "description": description, "parameters": parameters}
        self.schema: dict[str, Any] = {"type": "function", "function": schema}

    def bind(self, arguments: Any, state: RolloutState | None = None) -> inspect.BoundArguments:
        """Returns the arguments of one call, converted to the annotated types.

        `arguments` is a dict of names, a list of positional values, JSON text of either, or None. Raises
        `ArgumentError`.
        """
        if isinstance(arguments, str) and not arguments.strip():
            arguments = None
        elif isinstance(arguments, str):  # JSON, as in OpenAI's API
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise ArgumentError(f"the arguments are not valid JSON: {error}") from None
        by_name = self._by_name(arguments)
        try:
            checked = self._model.model_validate(by_name)
        except (ValidationError, RecursionError) as problem:
            try:  # the model may have written a list or object as a JSON string, or null for a default
                optional = {p.name for p in self.parameters if p.default is not p.empty}
                given = {name: value for name, value in by_name.items() if value is not None or name not in optional}
                checked = self._model.model_validate({name: _from_text(value) for name, value in given.items()})
            except (ValidationError, RecursionError):
                raise ArgumentError(self._explain(problem)) from None
        named = {
            name: getattr(checked, field) for field, name in self._fields.items() if field in checked.model_fields_set
        }
        extra = {p.name: checked.__pydantic_extra__ or {} for p in self.parameters if p.kind is _KINDS.VAR_KEYWORD}
        stated = {} if self.state_parameter is None else {self.state_parameter: state}
        bound = inspect.BoundArguments(inspect.signature(self.function), OrderedDict(named | extra | stated))
        bound.apply_defaults()
        return bound

    def _by_name(self, arguments: Any) -> dict[str, Any]:
        """Returns arguments by name. To the model, the parameter `*args` is a list."""
        if arguments is None:
            return {}
        if isinstance(arguments, dict):
            return {str(name): value for name, value in arguments.items()}
        if not isinstance(arguments, list):
            raise ArgumentError(f"the arguments of {self.name} must be a JSON object of names and values.")
        try:
            return dict(inspect.Signature(self.parameters).bind_partial(*arguments).arguments)
        except TypeError:
            most = sum(p.kind in (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD) for p in self.parameters)
            raise ArgumentError(f"{self.name} takes at most {most} arguments, not {len(arguments)}.") from None

    def _explain(self, error: ValidationError | RecursionError) -> str:
        """Returns what is wrong with the arguments, for the model."""
        if isinstance(error, RecursionError):
            return f"the arguments of {self.name} are nested too deeply."
        problems = []
        for problem in error.errors(include_url=False, include_context=False, include_input=False):
            where = ".".join(str(part) for part in problem["loc"])
            what = {"missing": "is missing", "extra_forbidden": "is not a parameter"}.get(problem["type"])
            problems.append(f"{where} {what}" if what else f"{where}: {problem['msg']}")
        more = f"; and {len(problems) - MAX_ERRORS_SHOWN} more" if len(problems) > MAX_ERRORS_SHOWN else ""
        takes = ", ".join(p.name for p in self.parameters) or "no arguments"
        return f"{self.name}: {'; '.join(problems[:MAX_ERRORS_SHOWN])}{more}. It takes: {takes}."

    def _build_model(self, described: dict[str, str]) -> type[BaseModel]:
        """Returns the pydantic model. Its fields are p0, p1, ... with aliases, because `_x` cannot be a field name."""
        fields: dict[str, Any] = {}
        takes_more = False
        for number, parameter in enumerate(self.parameters):
            if parameter.kind is _KINDS.VAR_KEYWORD:
                takes_more = True
                continue
            annotation: Any = parameter.annotation
            default: Any = parameter.default
            if parameter.kind is _KINDS.VAR_POSITIONAL:
                annotation, default = list.__class_getitem__(annotation), []
            elif default is parameter.empty:
                default = ...
            options: dict[str, Any] = {"alias": parameter.name}
            if parameter.name in described:  # otherwise a description in `Annotated` is used
                options["description"] = described[parameter.name]
            fields[f"p{number}"] = (annotation, Field(default, **options))
            self._fields[f"p{number}"] = parameter.name
        config = ConfigDict(extra="allow" if takes_more else "forbid", coerce_numbers_to_str=True)
        return create_model(self.name, __config__=config, **fields)


def func_to_tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the OpenAI tool `{"type": "function", "function": {"name", "description", "parameters"}}`.

    Types come from the annotations, descriptions from the docstring (Google, NumPy or Sphinx style) or from
    `Annotated[..., "text"]`. Raises `UserError` for a parameter that JSON cannot express.
    """
    return Tool(function).schema


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns the description of a function and of its parameters. A malformed docstring is used as the description."""
    try:
        parsed = docstring_parser.parse(text)
    except (docstring_parser.ParseError, IndexError):  # IndexError: a field without a name, as in ": :param x: y"
        return _join_lines(text), {}
    described = {
        name.strip().lstrip("*"): _join_lines(parameter.description)
        for parameter in parsed.params
        if parameter.description
        for name in parameter.arg_name.split(",")  # "a, b : int" in NumPy style
    }
    return _join_lines(parsed.description or ""), described


def _join_lines(text: str) -> str:
    """Returns the text with each paragraph on one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


def _shown_parameters(function: Callable[..., Any], name: str) -> tuple[list[inspect.Parameter], str | None]:
    """Returns the parameters in the schema, with annotations, and the name of the state's parameter."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except (NameError, TypeError, ValueError) as error:  # a ValueError of a function of C
        raise UserError(f"The parameters of the tool {name!r} cannot be read: {error}.") from error
    shown: list[inspect.Parameter] = []
    state_parameter = None
    for parameter in parameters:
        hint = hints.get(parameter.name, Any)
        if RolloutState in (hint, *typing.get_args(hint)):  # it may be optional
            state_parameter = parameter.name
            continue
        if parameter.default is None and hint is not Any:
            hint = Optional[hint]  # noqa: UP045  # `|` is not defined for every annotation
        shown.append(parameter.replace(annotation=_portable(hint)))
    return shown, state_parameter


def _portable(hint: Any) -> Any:
    """Returns the annotation in a form that pydantic accepts.

    Texts in `Annotated` become descriptions. A `TypedDict` of the standard library, which pydantic refuses before
    Python 3.12, is rebuilt with typing_extensions.
    """
    if typing.is_typeddict(hint):
        fields = {
            name: (Required if name in hint.__required_keys__ else NotRequired)[_portable(inner)]
            for name, inner in typing.get_type_hints(hint, include_extras=False).items()
        }
        return TypedDict(hint.__name__, fields)  # type: ignore[operator]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is None or origin is Literal or not inner:
        return hint
    if origin is Annotated:
        extras = [Field(description=extra) if isinstance(extra, str) else extra for extra in inner[1:]]
        return Annotated[_portable(inner[0]), *extras]
    converted = tuple(part if part is ... or isinstance(part, list) else _portable(part) for part in inner)
    if converted == inner:
        return hint
    return Union[converted] if origin in (Union, types.UnionType) else origin[converted]  # noqa: UP007


def _inlined(node: Any, definitions: dict[str, Any], open_names: tuple[str, ...]) -> Any:
    """Returns the schema without references and generated titles. A recursive type becomes an unspecified object."""
    if isinstance(node, list):
        return [_inlined(item, definitions, open_names) for item in node]
    if not isinstance(node, dict):
        return node
    if reference := node.get("$ref"):
        name = reference.rpartition("/")[2]
        beside = {key: value for key, value in node.items() if key != "$ref"}
        target = {"type": "object"} if name in open_names else definitions[name]
        return {**_inlined(target, definitions, (*open_names, name)), **_inlined(beside, definitions, open_names)}
    plain = {}
    for key, value in node.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "properties" and isinstance(value, dict):  # its keys are parameter names, possibly `title`
            plain[key] = {name: _inlined(inner, definitions, open_names) for name, inner in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            plain[key] = value
        else:
            plain[key] = _inlined(value, definitions, open_names)
    return plain


def _from_text(value: Any) -> Any:
    """Decodes a list or object written as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
