"""Lists and mappings that cannot be changed.

A frozen Pydantic model still hands out ordinary lists and dicts, and one `append` would change the configuration of one
process behind its hash. `freeze` replaces them, at any depth, by subclasses that refuse every mutation and otherwise
behave as before: they compare equal to plain ones, serialise to JSON, and survive pickling and deep copies. `thaw`
gives a plain, changeable copy, for code that is not ours.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

from pydantic import BaseModel


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
