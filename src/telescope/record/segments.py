"""Segments of a table: names, selection, merges, and superseded rows.

A segment is an immutable Parquet file with the rows `[first, end)` of its table, counted from 0 over the whole run. Its
name has the range and a level: `000000000128-000000000256.1.parquet`. Level 0 is a flush; a merge of level n has level
n + 1. A merge covers exactly the rows of its inputs, which are removed later.

Superseded rows: attempt 1 trained steps 1 to 57 and was killed; attempt 2 continued from the checkpoint after step 50,
so its first step is 51. Rows of attempt 1 at step 51 or later are then superseded. They stay on disk, and readers hide
them.

Owns names, listing, the choice of segments and of merges, without opening a file. Does not read or write rows.

Invariants: the rows on disk are `[0, n)`. A row lies in several files only if one of them covers the others. Names
alone therefore show a reader which files to open, whether rows are missing, and which files are new. There is no
manifest, and no file is rewritten in place.
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
"""Segments of one level that are merged into one of the next level. A table has at most 15 files per level, and a row
is rewritten once per level."""

SEALED_BYTES = 16 * 2**20
"""A segment of this size is never merged again, which bounds the work of a merge. Larger files are not read faster."""

MAX_LEVEL = 4
"""Highest level: 16^4 flushes, about 36 hours at one flush every two seconds. Bounds how often a row is rewritten."""

LISTING_SECONDS = 0.25
"""A directory listing that took longer is repeated. Replaced files stay longer than this, so a quicker listing cannot
miss both a merge and its inputs."""

LISTING_ATTEMPTS = 20
"""Listings until a gap counts as a lost file rather than a race with the writer."""

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
        """Returns whether the segment is too large, or merged too often, to be merged again."""
        return self.num_bytes >= SEALED_BYTES or self.level >= MAX_LEVEL


def segment_name(first: int, end: int, level: int) -> str:
    """Returns the file name of rows `[first, end)`. Names sort in the order of the rows."""
    return f"{first:012d}-{end:012d}.{level}.parquet"


def list_segments(directory: Path) -> list[Segment]:
    """Returns all complete segments in `directory`, including replaced ones."""
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
                    # Removed since the listing began, so the segment that covers it was there before.
                    continue
                first, end, level = (int(number) for number in match.groups())
                segments.append(Segment(directory / entry.name, first, end, level, num_bytes))
    except FileNotFoundError:
        return []
    return segments


@dataclass(frozen=True, slots=True)
class Selection:
    """Ordered segments that have each row once, and the missing row ranges."""

    segments: tuple[Segment, ...]
    gaps: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """One past the last row."""
        return self.segments[-1].end if self.segments else 0


def select(segments: Iterable[Segment]) -> Selection:
    """Chooses files that have each row once, the widest at each row."""
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
    """Returns the current segments of a table, without gaps and duplicates.

    Safe while the table is written and merged. A gap that stays over `LISTING_ATTEMPTS` listings is a lost file and is
    returned as a gap.
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
    """Returns the segments that other segments cover, which can be removed."""
    chosen = {segment.path for segment in select(segments).segments}
    return [segment for segment in segments if segment.path not in chosen]


def next_merge(segments: Sequence[Segment]) -> Sequence[Segment]:
    """Returns the oldest `FAN_IN` unsealed neighbors of one level, or nothing.

    `segments` is an ordered selection. Tries the lowest level first, because its merges are cheap and frequent.
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
    """Returns the last merges: runs of small neighbors, about `SEALED_BYTES` each."""
    merges: list[Sequence[Segment]] = []
    run: list[Segment] = []
    for segment in segments:
        if segment.sealed or (run and run[-1].end != segment.first):
            merges.append(run)
            run = []
        if not segment.sealed:
            run.append(segment)
            if sum(each.num_bytes for each in run) >= SEALED_BYTES:
                merges.append(run)
                run = []
    merges.append(run)
    return [run for run in merges if len(run) > 1]


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
