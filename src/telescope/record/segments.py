"""The names of segments, and which of them make up a table.

A segment is an immutable Parquet file that holds the rows `[first, end)` of its table, counted from 0 over the whole
life of the run, and says so in its name: `000000000128-000000000256.1.parquet`. The last number is its level: 0 as
flushed, n + 1 for a merge of level n. A merge covers exactly the rows of the files it was made from, which are removed
a while later.

Owns names, listing, the choice of segments and the choice of what to merge, all without opening a file. Does not read
or write rows.

Invariants: the rows on disk are `[0, n)`; a row lies in several files only if one of them covers the others. So names
alone tell a reader which files to open, whether anything is missing, and where it stopped reading the last time: no
manifest is needed, and nothing is ever rewritten in place.

Which rows survive a resume: a later attempt supersedes the steps that an earlier one made beyond it.

Attempt 1 trained steps 1 to 57 and died; attempt 2 continued from the checkpoint after step 50, so its first step is
51. From then on rows of attempt 1 at step 51 or later belong to a past that did not happen. They stay on disk, and
readers hide them: no rewriting, and the other past can still be looked at.

Owns that rule. Does not read files.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

FAN_IN = 16
"""Segments of one level that are merged into one of the next. A table then has at most 15 files a level, and a row is
rewritten once a level."""

SEALED_BYTES = 16 * 2**20
"""A segment of this size is never merged again: a merge costs a bounded amount of work, and where a megabyte or more is
flushed at a time a row is rewritten once. Larger files would not be read faster."""

MAX_LEVEL = 4
"""Highest level: 16^4 flushes, about 36 hours at one flush in two seconds. Bounds how often a row is rewritten."""

LISTING_SECONDS = 0.25
"""A directory listing that took longer is repeated: replaced files live longer than this, so that no listing that
was quicker can miss both a merge and its inputs."""

LISTING_ATTEMPTS = 20
"""Listings until a gap counts as a lost file and not as a race with the writer."""

SEGMENT_NAME = re.compile(r"^(\d+)-(\d+)\.(\d+)\.parquet$")


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a table: rows `[first, end)`."""

    path: Path
    first: int
    end: int
    level: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows in the file."""
        return self.end - self.first

    @property
    def sealed(self) -> bool:
        """Whether it is too large or too often merged to be merged again."""
        return self.num_bytes >= SEALED_BYTES or self.level >= MAX_LEVEL


def segment_name(first: int, end: int, level: int) -> str:
    """The file name of rows `[first, end)`. Names sort in the order of the rows."""
    return f"{first:012d}-{end:012d}.{level}.parquet"


def list_segments(directory: Path) -> list[Segment]:
    """All complete segments in `directory`, replaced ones included; empty if there is no such folder."""
    segments = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                match = SEGMENT_NAME.match(entry.name)
                if match is None:
                    continue
                try:
                    num_bytes = entry.stat().st_size
                except FileNotFoundError:
                    # Removed since the listing began, so that what covers it was there before the listing.
                    continue
                first, end, level = (int(part) for part in match.groups())
                segments.append(Segment(directory / entry.name, first, end, level, num_bytes))
    except FileNotFoundError:
        return []
    return segments


@dataclass(frozen=True, slots=True)
class Selection:
    """The segments that hold each row once, in order, and the row ranges `(first, end)` that no file holds."""

    segments: tuple[Segment, ...]
    gaps: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """One past the last row."""
        return self.segments[-1].end if self.segments else 0


def select(segments: Iterable[Segment]) -> Selection:
    """Pick the files that hold each row once: the widest at each row, and none that it covers."""
    chosen: list[Segment] = []
    gaps: list[tuple[int, int]] = []
    position = 0
    for segment in sorted(segments, key=lambda segment: (segment.first, -segment.end, -segment.level)):
        if segment.end <= position:
            continue
        if segment.first > position:
            gaps.append((position, segment.first))
        chosen.append(segment)
        position = segment.end
    return Selection(tuple(chosen), tuple(gaps))


def snapshot(directory: Path) -> Selection:
    """The table as it is now: no gap and no row twice, also while it is being written and merged.

    A gap that stays over `LISTING_ATTEMPTS` listings is a lost file, and is returned as such.
    """
    selection = Selection((), ())
    for attempt in range(LISTING_ATTEMPTS):
        if attempt:
            time.sleep(0.01)
        started = time.monotonic()
        selection = select(list_segments(directory))
        if not selection.gaps and time.monotonic() - started < LISTING_SECONDS:
            break
    return selection


def covered(segments: Sequence[Segment]) -> list[Segment]:
    """The segments whose rows all lie in another one, so that they can be removed."""
    chosen = {segment.path for segment in select(segments).segments}
    return [segment for segment in segments if segment.path not in chosen]


def next_merge(segments: Sequence[Segment]) -> Sequence[Segment]:
    """The oldest `FAN_IN` neighbours of one level that are not sealed, or nothing.

    `segments` is a selection in order. Lowest levels first, because they are cheap and many.
    """
    for level in sorted({segment.level for segment in segments}):
        run: list[Segment] = []
        for segment in segments:
            if segment.level != level or segment.sealed or (run and run[-1].end != segment.first):
                run = []
            if segment.level == level and not segment.sealed:
                run.append(segment)
            if len(run) == FAN_IN:
                return run
    return ()


def final_merges(segments: Sequence[Segment]) -> list[Sequence[Segment]]:
    """What to merge when a run ends: every stretch of small neighbours, up to about `SEALED_BYTES` each."""
    merges: list[Sequence[Segment]] = []
    run: list[Segment] = []
    for segment in segments:
        if segment.sealed or (run and run[-1].end != segment.first):
            merges.append(run)
            run = []
        if not segment.sealed:
            run.append(segment)
            if sum(part.num_bytes for part in run) >= SEALED_BYTES:
                merges.append(run)
                run = []
    merges.append(run)
    return [run for run in merges if len(run) > 1]


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
