"""What every section of the schema shares: frozen, closed to unknown names, strict about booleans.

A section is a Pydantic model with a `TITLE` and an `INTRO` for the documentation and the help; the string under each
field is its description. The sections are joined by inheritance into one flat `TelescopeConfig`, so a field's name is
unique in the whole schema. The first sentence of a description stands alone (the help prints only that); what follows
says the unit and when to change the field.
"""

from __future__ import annotations

import types
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from telescope.config.frozen import freeze

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
            raise ValueError(f"{str(value).lower()} is a boolean, which this field does not take")
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
