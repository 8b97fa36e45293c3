"""From rows as Python dictionaries to an Arrow table of a given schema.

Owns the conversion of values, user-made ones included: an environment's metric may be a bool, a numpy scalar or a
string that holds no number. Does not write.

Invariant: a batch of rows always converts. What cannot become its column's type is null, and is named in `problems`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from telescope.record.tables import Table


def rows_to_table(table: Table, rows: Sequence[Mapping[str, Any]]) -> tuple[pa.Table, dict[str, str]]:
    """Rows as an Arrow table, and for each column with a value that did not fit, what the value was.

    Missing keys are null. Columns are converted as a whole; a column that does not convert so is converted value by
    value, because one odd value must not cost the others.
    """
    arrays: list[pa.Array] = []
    problems: dict[str, str] = {}
    for column in table.columns:
        values = [row.get(column.name) for row in rows]
        arrays.append(_column(values, column.type, column.name, problems))
    return pa.Table.from_arrays(arrays, schema=table.schema), problems


def conform(data: pa.Table, schema: pa.Schema) -> pa.Table:
    """`data` in the columns of `schema`: those it lacks are null, those it has beyond are left out."""
    columns = [
        data.column(field.name).cast(field.type)
        if field.name in data.column_names
        else pa.chunked_array([pa.nulls(data.num_rows, field.type)])
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(values: list[Any], arrow_type: pa.DataType, name: str, problems: dict[str, str]) -> pa.Array:
    try:
        if pa.types.is_map(arrow_type):
            return pa.array([None if value is None else list(value.items()) for value in values], type=arrow_type)
        if pa.types.is_list(arrow_type) and any(hasattr(value, "dtype") for value in values):
            return _arrays_column(values, arrow_type)
        return pa.array(values, type=arrow_type)
    except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError):
        pass  # Some value does not fit as it is: below, each is coerced by itself, and what cannot be is reported.
    report = Report(name, problems)
    return pa.array([_fit(value, arrow_type, report) for value in values], type=arrow_type)


def _arrays_column(values: list[Any], arrow_type: pa.DataType) -> pa.Array:
    """A list column from one-dimensional numpy arrays. Per-token arrays are most of what is recorded; Arrow's own
    conversion boxes each number, which takes 50 times as long. Raises `ValueError` where a value would change."""
    import numpy as np  # Here, because a reader of records needs none of this.

    parts = [np.empty(0, np.int32) if value is None else np.asarray(value) for value in values]
    if any(part.ndim != 1 for part in parts):
        raise ValueError("a list of numbers is expected")
    flat = np.concatenate(parts)
    fitted = flat.astype(arrow_type.value_type.to_pandas_dtype(), casting="unsafe")
    if fitted.dtype.kind == "i" and not np.array_equal(fitted, flat):
        raise ValueError("not whole numbers of that size")
    ends = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int32)
    nulls = np.array([*(value is None for value in values), False])
    return pa.ListArray.from_arrays(pa.array(ends, mask=nulls), pa.array(fitted))


class Report:
    """Remembers the first value of a column that did not fit."""

    def __init__(self, column: str, problems: dict[str, str]) -> None:
        self._column = column
        self._problems = problems

    def __call__(self, value: Any, error: Exception) -> None:
        self._problems.setdefault(self._column, f"{_excerpt(value)} ({error})")


def _fit(value: Any, arrow_type: pa.DataType, report: Report) -> Any:
    """`value` made to fit, or None and a report. In a map or a list, only the entry that does not fit is lost."""
    if value is None:
        return None
    try:
        if pa.types.is_map(arrow_type):
            items = dict(value).items()
            return [(_as_text(key), _fit(item, arrow_type.item_type, report)) for key, item in items]
        if pa.types.is_list(arrow_type):
            return [_fit(item, arrow_type.value_type, report) for item in _as_list(value)]
        if pa.types.is_boolean(arrow_type):
            return bool(value)
        if pa.types.is_integer(arrow_type):
            return _as_integer(value, arrow_type)
        if pa.types.is_floating(arrow_type):
            return float(value)
        return _as_text(value)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        report(value, error)
        return None


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str | bytes | Mapping):
        raise TypeError("a list is expected")
    return list(value.tolist() if hasattr(value, "tolist") else value)


def _as_integer(value: Any, arrow_type: pa.DataType) -> int:
    number = int(value)
    if not isinstance(value, str) and not math.isclose(number, float(value)):
        raise ValueError("not a whole number")
    bound = 2 ** (arrow_type.bit_width - 1)
    if not -bound <= number < bound:
        raise OverflowError(f"does not fit {arrow_type}")
    return number


def _as_text(value: Any) -> str:
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
    # A lone surrogate is a legal Python string and not legal UTF-8; models and user code do produce them.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
