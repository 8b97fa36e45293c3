"""What a tool returned, as text for the model: JSON where it can be, in the same forms that arguments take.

Any object whatever becomes some text. Invariant: nothing is iterated that might not end.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

import numpy as np
from pydantic import BaseModel


def as_text(value: Any) -> str:
    """A text as it is, else JSON, else `str`, else a word about the type."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    for write in (lambda: json.dumps(value, ensure_ascii=False, default=_plain), lambda: str(value)):
        try:
            return write()
        except Exception:  # a number of too many digits, a loop, a `__str__` that raises
            continue
    return f"a result of type {type(value).__name__} that cannot be written out"


def _plain(value: Any) -> Any:
    """What JSON knows, for an object that it does not know."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    return str(value)
