"""The names of segments show the content of a table."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.record.segments import (
    FAN_IN,
    MAX_LEVEL,
    SEALED_BYTES,
    Segment,
    covered,
    final_merges,
    list_segments,
    next_merge,
    segment_name,
    select,
    snapshot,
)


def make(first: int, end: int, level: int = 0, num_bytes: int = 1000) -> Segment:
    return Segment(Path(segment_name(first, end, level)), first, end, level, num_bytes)


def merged(run: list[Segment], level: int) -> Segment:
    return make(run[0].first, run[-1].end, level, sum(segment.num_bytes for segment in run))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Segment], int]:
    """All files that a table ever had during appends and merges, and its number of rows."""
    sizes = draw(st.lists(st.integers(1, 50), min_size=1, max_size=FAN_IN**2 + 40))
    everything: list[Segment] = []
    current: list[Segment] = []
    row = 0
    for size in sizes:
        current.append(make(row, row + size))
        everything.append(current[-1])
        row += size
        while run := list(next_merge(current)):
            result = merged(run, run[0].level + 1)
            current[current.index(run[0]) : current.index(run[-1]) + 1] = [result]
            everything.append(result)
    return everything, row


@settings(deadline=None, max_examples=60)
@given(histories(), st.randoms())
def test_each_row_is_read_once_whichever_merged_inputs_remain(history, random):
    everything, num_rows = history
    replaced = covered(everything)
    left = [segment for segment in everything if segment not in replaced or random.random() < 0.5]
    random.shuffle(left)
    chosen = select(left)
    assert not chosen.gaps
    assert [segment.first for segment in chosen.segments] == [0, *(segment.end for segment in chosen.segments[:-1])]
    assert chosen.end == num_rows


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=30), st.data())
def test_a_lost_file_is_a_gap_of_exactly_its_rows(sizes, data):
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    segments = [make(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    lost = segments.pop(data.draw(st.integers(0, len(sizes) - 2)))
    assert select(segments).gaps == ((lost.first, lost.end),)


def test_many_flushes_leave_few_files():
    current: list[Segment] = []
    for row in range(2 * FAN_IN**2 + 1):
        current.append(make(row, row + 1))
        while run := list(next_merge(current)):
            current[current.index(run[0]) : current.index(run[-1]) + 1] = [merged(run, run[0].level + 1)]
        assert len(current) <= (FAN_IN - 1) * (MAX_LEVEL + 1)
    assert [segment.level for segment in current] == [2, 2, 0]


def test_large_and_often_merged_segments_are_not_merged():
    large = [make(row, row + 1, num_bytes=SEALED_BYTES) for row in range(FAN_IN)]
    often = [make(row, row + 1, level=MAX_LEVEL) for row in range(FAN_IN)]
    assert not next_merge(large)
    assert not next_merge(often)
    assert not final_merges(large)


def test_a_merge_never_bridges_a_gap():
    segments = [make(row, row + 1) for row in range(2 * FAN_IN) if row != FAN_IN - 1]
    assert [segment.first for segment in next_merge(segments)] == list(range(FAN_IN, 2 * FAN_IN))
    assert [run[0].first for run in final_merges(segments)] == [0, FAN_IN]


def test_other_files_are_ignored(tmp_path):
    for name in (segment_name(0, 5, 0), ".writing-1-" + segment_name(5, 9, 0), "notes.txt", "5-9.parquet"):
        (tmp_path / name).write_bytes(b"x")
    assert [(segment.first, segment.end) for segment in list_segments(tmp_path)] == [(0, 5)]


def test_a_missing_table_is_empty(tmp_path):
    assert snapshot(tmp_path / "missing").segments == ()
