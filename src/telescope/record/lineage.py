"""Which rows survive a resume: a later attempt supersedes the steps that an earlier one made beyond it.

Attempt 1 trained steps 1 to 57 and died; attempt 2 continued from the checkpoint after step 50, so its first step is
51. From then on rows of attempt 1 at step 51 or later belong to a past that did not happen. They stay on disk, and
readers hide them: no rewriting, and the other past can still be looked at.

Owns that rule. Does not read files.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

Cutoffs = Mapping[int, int]
"""Per attempt the first step that is superseded; attempts that nothing supersedes are missing."""


def cutoffs(first_steps: Mapping[int, int | None]) -> dict[int, int]:
    """The cutoffs, from the first step of each attempt. An attempt that trained nothing (None) supersedes nothing."""
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
    """A condition that is true for superseded rows and false, never null, for all others."""
    if not cut:
        return "false"
    each = " OR ".join(f"(attempt = {attempt} AND step >= {first})" for attempt, first in sorted(cut.items()))
    return f"coalesce({each}, false)"


def superseded(data: pa.Table, cut: Cutoffs) -> pa.ChunkedArray | pa.Array:
    """The same as a boolean array over the rows of `data`, which has the columns `attempt` and `step`."""
    hidden = pa.chunked_array([pa.repeat(pa.scalar(False), data.num_rows)])
    for attempt, first in cut.items():
        beyond = pc.and_(pc.equal(data["attempt"], attempt), pc.greater_equal(data["step"], first))
        hidden = pc.or_(hidden, pc.fill_null(beyond, False))
    return hidden
