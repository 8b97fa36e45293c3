"""Pending rows stay within their bound, and the least important are dropped first."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.record.pending import PendingRows, first_rows, row_bytes
from telescope.record.schema import Keep
from telescope.record.tables import TABLES

NAMES = sorted(TABLES)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(NAMES), max_size=200), st.integers(1, 30))
def test_every_row_is_pending_or_counted_as_dropped_and_steps_are_never_dropped(names, max_rows):
    pending = PendingRows(max_rows, 2**40)
    for place, name in enumerate(names):
        pending.add(name, {"place": place})
    waiting = pending.take()
    for name in NAMES:
        assert len(waiting[name]) + pending.dropped[name] == names.count(name)
    always = sum(names.count(name) for name in NAMES if TABLES[name].keep is Keep.ALWAYS)
    assert pending.num_rows <= max(max_rows, always)
    assert not any(pending.dropped[name] for name in NAMES if TABLES[name].keep is Keep.ALWAYS)


def test_telemetry_is_dropped_before_turns_and_turns_before_samples():
    pending = PendingRows(4, 2**40)
    for name in ("samples", "turns", "spans", "gauges"):
        pending.add(name, {})
    lost = []
    for _ in range(4):
        before = dict(pending.dropped)
        pending.add("steps", {})
        lost += [name for name in NAMES if pending.dropped[name] > before.get(name, 0)]
    assert lost == ["gauges", "spans", "turns", "samples"]


def test_long_texts_count_with_their_length():
    pending = PendingRows(1000, 100_000)
    for _ in range(10):
        pending.add("samples", {"completion_text": "x" * 30_000})
    assert pending.num_bytes <= 100_000
    assert pending.dropped["samples"] == 7
    assert row_bytes({"token_ids": list(range(1000)), "metrics": {"a": 1.0}}) > 30_000


def test_rows_that_are_being_written_count_and_are_not_dropped():
    pending = PendingRows(2, 2**40)
    pending.add("logs", {"message": "a"})
    taken = pending.take()
    for message in "bc":
        pending.add("logs", {"message": message})
    assert (pending.num_rows, pending.dropped["logs"]) == (2, 1), "of the newer ones"
    pending.remove(list(taken["logs"]))
    assert [row for row, _ in pending.take()["logs"]] == [{"message": "c"}]


def test_rows_that_could_not_be_written_come_before_newer_ones():
    pending = PendingRows(100, 2**40)
    for message in "ab":
        pending.add("logs", {"message": message})
    taken = pending.take()
    pending.add("logs", {"message": "c"})
    pending.put_back(taken)
    assert [row["message"] for row, _ in pending.take()["logs"]] == ["a", "b", "c"]


def test_a_flush_is_split_into_bounded_parts():
    for max_rows, max_bytes, expected in ((3, 2**40, 3), (100, 2500, 2), (100, 1, 1)):
        rows = deque(({}, 1060) for _ in range(10))
        assert len(first_rows(rows, max_rows, max_bytes)) == expected
        assert len(rows) == 10 - expected
