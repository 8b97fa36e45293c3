"""Pending rows stay within their bound, and the least important are dropped first."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.record.pending import PendingRows, row_bytes
from telescope.record.tables import TABLES, Keep

NAMES = sorted(TABLES)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(NAMES), max_size=200), st.integers(1, 30))
def test_every_row_is_pending_or_counted_as_dropped_and_steps_are_never_dropped(names, max_rows):
    pending = PendingRows(max_rows, 2**40)
    for place, name in enumerate(names):
        pending.add(name, {"place": place})
    waiting = {name: pending.first(name, pending.cut().get(name, 0), 1000, 2**40) for name in NAMES}
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


def test_rows_after_the_mark_wait_for_the_next_flush():
    pending = PendingRows(100, 2**40)
    pending.add("samples", {"sample_id": "a"})
    cut = pending.cut()["samples"]
    pending.add("samples", {"sample_id": "b"})
    assert [row["sample_id"] for row in pending.first("samples", cut, 10, 2**40)] == ["a"]


def test_a_row_dropped_during_its_write_is_not_lost():
    pending = PendingRows(2, 2**40)
    pending.add("logs", {"message": "a"})
    rows = pending.first("logs", 1, 10, 2**40)
    for message in "bc":
        pending.add("logs", {"message": message})
    assert pending.dropped["logs"] == 1
    pending.written("logs", rows)
    assert pending.dropped["logs"] == 0
    assert pending.num_rows == 2


def test_a_flush_is_split_into_bounded_parts():
    pending = PendingRows(100, 2**40)
    for _ in range(10):
        pending.add("samples", {"completion_text": "x" * 1000})
    assert len(pending.first("samples", 10, 3, 2**40)) == 3
    assert len(pending.first("samples", 10, 100, 2500)) == 2
    assert len(pending.first("samples", 10, 100, 1)) == 1


def test_long_texts_of_any_script_count_with_their_memory():
    for letter in ("a", "é", "字", "😀"):
        text = letter * 100_000
        assert row_bytes({"message": text}) == pytest.approx(sys.getsizeof(text), rel=0.01)
