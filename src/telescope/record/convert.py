"""Converts rows (dictionaries) to an Arrow table of a given schema.

Values may come from user code: an environment's metric may be a bool, a numpy scalar or a string that is not a number.

Invariant: a batch of rows always converts. A value that does not fit its column becomes null and is named in
`problems`.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from telescope.record.tables import Table

logger = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Rows of a table, their approximate size (Arrow takes longer to measure a slice), and the attempt to record."""

    rows: pa.RecordBatch
    num_bytes: int
    attempt: int = 0


def rows_to_table(table: Table, rows: Sequence[Mapping[str, Any]]) -> tuple[pa.Table, dict[str, str]]:
    """Converts rows to an Arrow table. Returns the table, and the first value of each column that did not fit.

    Missing keys are null. A column that cannot be converted as a whole is converted value by value, so that one odd
    value does not lose the others.
    """
    arrays: list[pa.Array] = []
    problems: dict[str, str] = {}
    for column in table.columns:
        values = [row.get(column.name) for row in rows]
        arrays.append(_column(values, column.type, column.name, problems))
    return pa.Table.from_arrays(arrays, schema=table.schema), problems


def warn_of(table: Table, problems: Mapping[str, str], warned: set[str]) -> None:
    """Logs the `problems` of a table's columns, once for each column that is not in `warned` yet."""
    for column, problem in problems.items():
        if (name := f"{table.name}.{column}") not in warned:
            warned.add(name)
            what = "has values that do not fit and are recorded as null, the first"
            logger.warning("record: %s %s: %s", name, what, problem)


def encode(table: Table, rows: Sequence[Mapping[str, Any]], warned: set[str]) -> bytes:
    """Encodes rows as an Arrow message, which `decode` reads. Logs problems as `warn_of` does."""
    data, problems = rows_to_table(table, rows)
    warn_of(table, problems, warned)
    (batch,) = data.to_batches()
    return bytes(batch.serialize())


def decode(table: Table, message: bytes) -> pa.RecordBatch:
    """Returns the rows of a message that `encode` returned."""
    return pa.ipc.read_record_batch(pa.py_buffer(message), table.schema)


def conform(data: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns `data` with exactly the columns of `schema`. Missing columns are null."""
    if data.schema.equals(schema):
        return data
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
        pass  # Some value does not fit. The code below converts each value alone and reports failures.

    def report(value: Any, error: Exception) -> None:
        text = repr(value)
        problems.setdefault(name, f"{text if len(text) <= 80 else text[:77] + '...'} ({error})")

    return pa.array([_fit(value, arrow_type, report) for value in values], type=arrow_type)


def _arrays_column(values: list[Any], arrow_type: pa.DataType) -> pa.Array:
    """Returns a list column from one-dimensional numpy arrays. Raises `ValueError` if a value would change.

    Most recorded data is per-token arrays. Arrow's own conversion boxes each number, which takes 50 times as long.
    """
    import numpy as np  # imported here because readers of a record do not need it

    arrays = [np.empty(0, np.int32) if value is None else np.asarray(value) for value in values]
    if any(array.ndim != 1 for array in arrays):
        raise ValueError("a list of numbers is expected")
    flat = np.concatenate(arrays)
    fitted = flat.astype(arrow_type.value_type.to_pandas_dtype(), casting="unsafe")
    if fitted.dtype.kind == "i" and not np.array_equal(fitted, flat):
        raise ValueError("not whole numbers of that size")
    ends = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int32)
    nulls = np.array([*(value is None for value in values), False])
    return pa.ListArray.from_arrays(pa.array(ends, mask=nulls), pa.array(fitted))


def _fit(value: Any, arrow_type: pa.DataType, report: Callable[[Any, Exception], None]) -> Any:
    """Converts `value` to the type, or reports it and returns None. Maps and lists lose only unfit entries."""
    if value is None:
        return None
    try:
        if pa.types.is_map(arrow_type):
            entries = dict(value).items()
            return [(_as_text(key), _fit(item, arrow_type.item_type, report)) for key, item in entries]
        if pa.types.is_list(arrow_type):
            if isinstance(value, str | bytes | Mapping):
                raise TypeError("a list is expected")
            items = value.tolist() if hasattr(value, "tolist") else value
            return [_fit(item, arrow_type.value_type, report) for item in items]
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
    # Models and user code produce lone surrogates, which are valid in a Python string but not in UTF-8.
    return text.encode("utf-8", errors="replace").decode("utf-8")
