"""Base classes of the configuration: sections, field types, and rules between fields.

A section is a Pydantic model: frozen, closed to unknown names, strict about booleans. Its title and docstring appear in
the documentation and the help; the string under a field is its description, whose first sentence the help prints
alone. The sections are joined by inheritance into one flat `TelescopeConfig`, so every field name is unique.

A frozen Pydantic model still contains mutable lists and dicts. `freeze` replaces them, at any depth, by subclasses
that refuse mutation and otherwise behave as before.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from telescope.utils.text import path_problem

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig


def _refuse(self: object, *_: object, **__: object) -> NoReturn:
    raise TypeError("the resolved configuration is frozen: use `config.replace(...)`, or the copy in `config.values`")


class FrozenList(list):
    """Immutable list, equal to a list of the same items."""

    __slots__ = ()

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[type[FrozenList], tuple[list[Any]]]:
        return FrozenList, (list(self),)


class FrozenDict(dict):
    """Immutable dict, equal to a dict of the same items."""

    __slots__ = ()

    __setitem__ = __delitem__ = __ior__ = _refuse
    pop = popitem = clear = update = setdefault = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[Any, Any]]]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Returns the value with every list and dict in it frozen. Tuples become frozen lists, as in JSON.

    Raises `ValueError` for what JSON cannot carry to another process unchanged (YAML also knows dates, sets, infinite
    numbers and keys that are not text). Pydantic models stay as they are.
    """
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} must be text; put it in quotes")
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return FrozenList([freeze(item) for item in value])
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} must be a finite number")
    if value is None or isinstance(value, bool | int | float | str | BaseModel):
        return value
    raise ValueError(f"{value!r} is a {type(value).__name__}, which cannot be kept as it is; put it in quotes")


Dtype = Literal["float32", "float16", "bfloat16"]


# Bounds far above any real run. They catch slips (a zero too many, a wrong unit) before anything is planned.
MAX_STEPS = 10_000_000
MAX_SECONDS = 366 * 24 * 3600  # a year
MAX_WORKERS = 1024
Workers = Annotated[int, Field(ge=1, le=MAX_WORKERS)]  # processes, GPUs or threads of one kind
Count = Annotated[int, Field(ge=1, le=65_536)]  # number of prompts, answers or requests
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]  # length of a text, or size of a buffer, in tokens
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
WholeSeconds = Annotated[int, Field(ge=1, le=MAX_SECONDS)]


def refuse(problem: Callable[[Any], str | Literal[False] | None]) -> AfterValidator:
    """Returns a validator that refuses a value with what `problem` says of it, if anything."""

    def check(value: Any) -> Any:
        if reason := problem(value):
            raise ValueError(reason)
        return value

    return AfterValidator(check)


_WITHOUT_NUL = refuse(lambda text: "\0" in text and "it must not contain the character NUL")
Text = Annotated[str, Field(min_length=1, pattern=r"\S"), _WITHOUT_NUL]  # text that is not blank
PathText = Annotated[Text, refuse(path_problem)]
"""A path, whether it exists or not; `~` is the home directory."""


class Section(BaseModel):
    """Base of the sections and of the entries (environments, evals) inside them."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )

    TITLE: ClassVar[str] = ""
    INTRO: ClassVar[str] = ""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.TITLE, cls.INTRO = cls.model_config.get("title") or "", " ".join((cls.__doc__ or "").split())

    @field_validator("*", mode="before")
    @classmethod
    def _a_boolean_is_not_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Pydantic reads true as 1, so that `group_size: yes` would silently train groups of one.
        if isinstance(value, bool) and info.field_name and not accepts(cls, info.field_name, bool):
            quotes = "; put it in quotes if it is text" if accepts(cls, info.field_name, str) else ""
            raise ValueError(f"{str(value).lower()} is a boolean, which this field does not take{quotes}")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _freeze(cls, value: Any) -> Any:
        return freeze(value)


def member_types(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the type itself, without `Annotated`. Keeps `Literal`."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in member_types(part))
    if origin is Annotated:
        return member_types(get_args(annotation)[0])
    return (annotation,)


def accepts(section: type[BaseModel], field: str, kind: type) -> bool:
    """Returns whether the field's type allows `kind` (`Any` allows everything)."""
    members = member_types(section.model_fields[field].annotation)
    return any(member is Any or member is kind or get_origin(member) is kind for member in members)


@dataclass(frozen=True)
class Rule:
    """A relation between fields. `fields[0]` is adjusted, and named first."""

    fields: tuple[str, ...]
    statement: str
    """The predicate of the error's first sentence, such as "must divide trainer_num_workers"."""
    broken: Callable[[TelescopeConfig], bool]
    fix: Callable[[TelescopeConfig], str]
    """What to type instead."""
    adjust: Callable[[TelescopeConfig], Any] | None = None
    """The value that repairs `fields[0]` when only its default breaks the rule."""
    is_reported: bool = True
    """Whether the user is told of an adjusted default. False if that is what the other fields ask for."""


def requires(field: str, other: str, adjust: Callable[[TelescopeConfig], Any] | None = None) -> Rule:
    """Returns the rule that `field` may be true, or not null, only where `other` is true."""
    return Rule(
        (field, other),
        f"requires {other}",
        lambda c: getattr(c, field) is not None and getattr(c, field) is not False and not getattr(c, other),
        lambda c: (
            f"Set {other} to true, or {f'{field} to false' if getattr(c, field) is True else f'leave {field} null'}"
        ),
        adjust,
    )


def up_to_multiple(value: int, of: int) -> int:
    """Rounds up to a multiple."""
    return -(-value // of) * of
