"""Lists and mappings that cannot be changed.

A frozen Pydantic model still hands out ordinary lists and dicts, and one `append` would change the configuration of one
process behind its hash. `freeze` replaces them, at any depth, by subclasses that refuse every mutation and otherwise
behave as before: they compare equal to plain ones, serialise to JSON, and survive pickling and deep copies. `thaw`
gives a plain, changeable copy, for code that is not ours.

What every section of the schema shares: frozen, closed to unknown names, strict about booleans.

A section is a Pydantic model with a `TITLE` and an `INTRO` for the documentation and the help; the string under each
field is its description. The sections are joined by inheritance into one flat `TelescopeConfig`, so a field's name is
unique in the whole schema. The first sentence of a description stands alone (the help prints only that); what follows
says the unit and when to change the field.
"""

from __future__ import annotations

import math
import types
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


def _refuse(self: object, *_: object, **__: object) -> NoReturn:
    raise TypeError(
        "the resolved configuration is frozen: build another one with `config.replace(...)`, or copy with `thaw`"
    )


class FrozenList(list):
    """A list that refuses to be changed. Equal to a plain list of the same items."""

    __slots__ = ()

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[type[FrozenList], tuple[list[Any]]]:
        return FrozenList, (list(self),)


class FrozenDict(dict):
    """A dict that refuses to be changed. Equal to a plain dict of the same items."""

    __slots__ = ()

    __setitem__ = __delitem__ = __ior__ = _refuse
    pop = popitem = clear = update = setdefault = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[Any, Any]]]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """The same value with every list and dict inside it frozen. Tuples become frozen lists, as JSON would make them.

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


def thaw(value: Any) -> Any:
    """A plain, changeable copy of a frozen value, at any depth."""
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [thaw(item) for item in value]
    return value


Dtype = Literal["float32", "float16", "bfloat16"]
PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


# Bounds far above anything that runs, so that a slip (a zero too many, a unit mistaken) is an error at once and not a
# machine that hangs while it plans.
MAX_STEPS = 10_000_000
MAX_SECONDS = 366 * 24 * 3600  # a year
Workers = Annotated[int, Field(ge=1, le=1024)]
"""Processes, GPUs or threads of one kind."""
Count = Annotated[int, Field(ge=1, le=65_536)]
"""Things of a batch: prompts, answers, requests."""
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]
"""A length of text, or the size of a buffer of it."""
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
WholeSeconds = Annotated[int, Field(ge=1, le=MAX_SECONDS)]
Text = Annotated[str, Field(min_length=1, pattern=r"\S")]
"""Text that is not blank."""


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
    """The alternatives of a union, or the type alone, without what `Annotated` adds. `Literal` is kept as it is."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in member_types(part))
    if origin is Annotated:
        return member_types(get_args(annotation)[0])
    return (annotation,)


def accepts(section: type[BaseModel], field: str, kind: type) -> bool:
    """Whether the field's type has `kind` among its alternatives (`Any` takes everything)."""
    members = member_types(section.model_fields[field].annotation)
    return any(member is Any or member is kind or get_origin(member) is kind for member in members)
