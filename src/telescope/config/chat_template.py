"""Compiles chat templates, and tries one."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from telescope.utils.text import single_line

QUESTION = "What is two plus two?"
CONVERSATIONS = (
    [{"role": "user", "content": QUESTION}],
    [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": QUESTION}],
)
"""What a template is tried with: one that accepts either is accepted."""

NO_TEMPLATE = (
    "has no chat template, as is usual for base models. Set chat_template to a Jinja2 template or a file with "
    "one, or choose an instruct model"
)


class _GenerationBlock(jinja2.ext.Extension):
    """The `{% generation %}` block, which marks the model's text. It only is a scope of its own here."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> Any:
        return caller()


_DICT_ATTRIBUTES = frozenset(dir(dict))


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with the same verdicts in half of the time of a long conversation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:  # without the error that `dict` lacks it
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # A verdict depends on the type alone.
        key = type(obj), attr
        if key not in self._safe:
            self._safe[key] = super().is_safe_attribute(obj, attr, value)
        return self._safe[key]


def compile_template(template: str) -> jinja2.Template:
    """Compiles a template with the extensions and functions of transformers. Raises `jinja2.TemplateSyntaxError`."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def render_problem(template: jinja2.Template, variables: Mapping[str, Any]) -> str | None:
    """Returns why a template renders no prompt with these variables, as a predicate. None if it does."""
    problems = []
    for messages in CONVERSATIONS:
        try:
            text = template.render(messages=messages, add_generation_prompt=True, **variables)
        except Exception as error:  # a template may raise whatever Python raises
            problems.append(f"raises an error: {single_line(f'{type(error).__name__}: {error}')}")
            continue
        if not text.strip():
            return "renders to nothing"
        return None if QUESTION in text else f"leaves out what the user asks: it renders to {text[:200]!r}"
    return problems[0]
