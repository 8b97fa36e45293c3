"""Superseded rows: those of steps that a later attempt trained again.

Attempt 1 trained steps 1 to 57 and was killed; attempt 2 continued from the checkpoint after step 50, so its first step
is 51. Rows of attempt 1 at step 51 or later are then superseded. They stay on disk, and readers hide them.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

Cutoffs = Mapping[int, int]
"""First superseded step per attempt. Attempts without superseded steps are missing."""


def cutoffs(first_steps: Mapping[int, int | None]) -> dict[int, int]:
    """Returns the cutoffs for the first step of each attempt. None: an attempt that trained nothing."""
    result: dict[int, int] = {}
    lowest: int | None = None
    for attempt in sorted(first_steps, reverse=True):
        if lowest is not None:
            result[attempt] = lowest
        first = first_steps[attempt]
        if first is not None:
            lowest = first if lowest is None else min(lowest, first)
    return result


def superseded_sql(cut: Cutoffs) -> str:
    """Returns an SQL condition for superseded rows, which is never null."""
    if not cut:
        return "false"
    each = " OR ".join(f"(attempt = {attempt} AND step >= {first})" for attempt, first in sorted(cut.items()))
    return f"coalesce({each}, false)"


def superseded(data: pa.Table, cut: Cutoffs) -> pa.ChunkedArray | pa.Array:
    """Returns a boolean array over `data`: whether each row is superseded."""
    hidden = pa.chunked_array([pa.repeat(pa.scalar(False), data.num_rows)])
    for attempt, first in cut.items():
        beyond = pc.and_(pc.equal(data["attempt"], attempt), pc.greater_equal(data["step"], first))
        hidden = pc.or_(hidden, pc.fill_null(beyond, False))
    return hidden
