"""Reads the YAML tables that modules keep beside them, makes values of JSON, and groups data by size."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pydantic_core

T = TypeVar("T")


def table_of(file: str) -> Any:
    """Returns the content of the YAML file beside a module, given the module's `__file__`."""
    import yaml  # the record is read without it

    # Uses libyaml if available, because every command imports such modules.
    return yaml.load(Path(file).with_suffix(".yaml").read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def to_json_value(value: Any) -> Any:
    """Returns a value that JSON can represent. NaN and infinity become null."""
    return pydantic_core.to_jsonable_python(value, inf_nan_mode="null", bytes_mode="base64", fallback=str)


def split_by_size(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yields lists of consecutive items with at most `limit` in each. A larger item is alone in its list."""
    group: list[T] = []
    used = 0
    for item in items:
        size = size_of(item)
        if group and used + size > limit:
            yield group
            group, used = [], 0
        group.append(item)
        used += size
    if group:
        yield group
