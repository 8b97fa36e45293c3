"""The names of files, and the rows of tails, show which files have each row once."""

import struct
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.record.table_files import AFTER_ALL_ROWS, TableFile, block_name, list_files, read_tail, select, tail_name


def block(first: int, end: int) -> TableFile:
    return TableFile(Path(block_name(first, end)), first, end)


def write_tail(folder: Path, first: int, *values: list[int], cut: int = 0) -> Path:
    """Writes a tail with one batch for each list of values, without its last `cut` bytes."""
    batches = [pa.record_batch({"value": each}) for each in values]
    content = pa.schema([("value", pa.int64())]).serialize().to_pybytes()
    content += b"".join(batch.serialize() for batch in batches)
    path = folder / tail_name(first)
    path.write_bytes(content[: len(content) - cut])
    return path


def values_of(folder: Path, cursor: int = 0) -> list[int]:
    return [row for file in list_files(folder, cursor).files for row in file.rows["value"].to_pylist()]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.randoms())
def test_each_row_is_read_once_whichever_merged_inputs_remain(sizes, random):
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    small = [block(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    cuts = sorted({0, len(small), *(random.randrange(len(small)) for _ in range(3))})
    files = []
    for begin, end in pairwise(cuts):
        files.append(block(small[begin].first, small[end - 1].end))
        files += [each for each in small[begin:end] if random.random() < 0.5]
    random.shuffle(files)
    chosen = select(files)
    assert not chosen.gaps
    assert [file.first for file in chosen.files] == [0, *(file.end for file in chosen.files[:-1])]
    assert chosen.end == ends[-1]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=2, max_size=40), st.data())
def test_a_lost_file_is_a_gap_of_its_rows(sizes, data):
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    files = [block(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    lost = files.pop(data.draw(st.integers(0, len(sizes) - 2)))
    assert select(files).gaps == ((lost.first, lost.end),)
    assert not select(files, lost.end).gaps, "rows before a cursor are not missed"


def test_blocks_and_no_other_names_are_listed(tmp_path):
    names = [block_name(0, 5), block_name(5, 9), "notes.txt", "9-12.csv", "x.arrows"]
    for name in (*names, ".writing-1-" + block_name(12, 14)):
        (tmp_path / name).touch()
    assert [(file.first, file.end) for file in list_files(tmp_path).files] == [(0, 5), (5, 9)]


def test_a_folder_that_does_not_exist_has_no_files(tmp_path):
    listing = list_files(tmp_path / "missing")
    assert (listing.files, listing.gaps, listing.end) == ((), (), 0)


def test_rows_that_a_kill_cut_off_are_left_out(tmp_path):
    for cut in range(1, pa.record_batch({"value": [3]}).serialize().size):
        path = write_tail(tmp_path, 0, [1, 2], [3], cut=cut)
        assert read_tail(path)["value"].to_pylist() == [1, 2]


def test_a_tail_ends_where_the_next_one_begins(tmp_path):
    write_tail(tmp_path, 0, [1, 2, 3, 4])
    write_tail(tmp_path, 3, [4, 5])
    assert values_of(tmp_path) == [1, 2, 3, 4, 5]
    assert values_of(tmp_path, 3) == [4, 5]


def test_only_the_newest_tail_is_read_to_count_rows(tmp_path):
    write_tail(tmp_path, 0, [1, 2]).write_bytes(b"not read")
    write_tail(tmp_path, 2, [3])
    assert list_files(tmp_path, AFTER_ALL_ROWS).end == 3
    assert list_files(tmp_path, 2).damaged == ()


def test_a_file_that_is_no_arrow_stream_is_named(tmp_path):
    write_tail(tmp_path, 0, [1])
    foreign = write_tail(tmp_path, 1)
    foreign.write_bytes(b"PK\x03\x04 something else")
    listing = list_files(tmp_path)
    assert (listing.damaged, listing.end) == ((foreign,), 1)


def test_a_damaged_newest_tail_leaves_the_number_of_rows(tmp_path):
    write_tail(tmp_path, 0, [1, 2])
    for content in (b"", b"PK\x03\x04 something else"):
        (tmp_path / tail_name(2)).write_bytes(content)
        assert list_files(tmp_path, AFTER_ALL_ROWS).end == 2
        assert values_of(tmp_path) == [1, 2]


def test_a_damaged_tail_hides_no_rows_of_the_one_before(tmp_path):
    write_tail(tmp_path, 0, [1, 2, 3])
    (tmp_path / tail_name(1)).write_bytes(b"not a stream")
    assert values_of(tmp_path) == [1, 2, 3]


def test_texts_outside_their_file_end_a_tail(tmp_path):
    batch = pa.record_batch({"value": ["a", "b"]})
    content = batch.schema.serialize().to_pybytes() + batch.serialize().to_pybytes()
    path = tmp_path / tail_name(0)
    path.write_bytes(content.replace(struct.pack("<3i", 0, 1, 2), struct.pack("<3i", 0, 2**30, 2)))
    assert read_tail(path).num_rows == 0
