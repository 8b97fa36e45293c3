"""Any row can be written: a value that does not fit its column becomes null and is named."""

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.record.convert import Batch, conform, decode, encode, rows_to_table
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.tables import TABLES

NAME = st.text(st.characters(), max_size=3)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(TABLES)), st.data())
def test_any_value_can_be_in_a_batch(name, data):
    columns = st.sampled_from(TABLES[name].column_names)
    rows = data.draw(st.lists(st.dictionaries(columns, ANYTHING, max_size=4), max_size=4))
    table, _ = rows_to_table(TABLES[name], rows)
    assert table.num_rows == len(rows)
    assert table.schema == TABLES[name].schema


def test_numpy_values_are_numbers():
    metrics = {"a": np.float64(1), "b": np.int32(2), "c": True}
    row = {"step": np.int64(3), "reward_mean": np.float32(0.5), "metrics": metrics}
    table, problems = rows_to_table(TABLES["steps"], [row])
    assert not problems
    assert table.to_pylist()[0]["metrics"] == [("a", 1.0), ("b", 2.0), ("c", 1.0)]
    assert table["step"].to_pylist() == [3]


def test_token_arrays_and_lists_are_equal():
    values = {"token_ids": np.array([1, 2], np.int64), "engine_logprobs": np.array([-0.5, -1.0], np.float32)}
    lists = {"token_ids": [1, 2], "engine_logprobs": [-0.5, -1.0]}
    table, problems = rows_to_table(TABLES["tokens"], [values, {}, lists, {"token_ids": np.empty(0, np.int32)}])
    assert not problems
    assert table["token_ids"].to_pylist() == [[1, 2], None, [1, 2], []]
    assert table["engine_logprobs"].to_pylist() == [[-0.5, -1.0], None, [-0.5, -1.0], None]


def test_token_arrays_that_do_not_fit_are_null_and_named():
    arrays = [np.array([1, 2]), np.array([2**40]), np.array([0.5]), np.array([[1]]), np.array(["a"])]
    table, problems = rows_to_table(TABLES["tokens"], [{"token_ids": array} for array in arrays])
    assert table["token_ids"].to_pylist() == [[1, 2], [None], [None], [None], [None]]
    assert list(problems) == ["token_ids"]


def test_an_odd_metric_loses_only_itself():
    rows = [{"metrics": {"good": 1.0, "odd": "high"}, "reward": 1.0}, {"metrics": {"good": 2.0}}]
    table, problems = rows_to_table(TABLES["samples"], rows)
    assert table["metrics"].to_pylist() == [[("good", 1.0), ("odd", None)], [("good", 2.0)]]
    assert list(problems) == ["metrics"]
    assert "'high'" in problems["metrics"]


def test_invalid_unicode_is_written():
    table, problems = rows_to_table(TABLES["samples"], [{"completion_text": "a\ud800b", "tags": {"kind\udfff": 1}}])
    assert not problems
    assert table["completion_text"].to_pylist() == ["a?b"]
    assert table["tags"].to_pylist() == [[("kind?", "1")]]


def test_a_missing_column_reads_as_null():
    data = conform(pa.table({"step": pa.array([1], pa.int64()), "unknown": ["x"]}), TABLES["steps"].schema)
    assert data.schema == TABLES["steps"].schema
    assert data["reward_mean"].to_pylist() == [None]


def test_encoded_rows_are_those_of_the_attempt_that_writes_them(tmp_path):
    rows = [{"sample_id": "5-0", "turn": turn, "role": "assistant", "text": f"a\ud800{turn}"} for turn in range(3)]
    with Recorder(tmp_path, attempt=2) as recorder:
        batch = decode(TABLES["turns"], encode(TABLES["turns"], rows, set()))
        recorder.write("turns", Batch(batch.slice(1), batch.nbytes))
        recorder.write("turns", rows[0])
    read = sorted(Run(tmp_path).table("turns").to_pylist(), key=lambda row: row["turn"])
    assert [(row["attempt"], row["turn"], row["text"]) for row in read] == [(2, n, f"a?{n}") for n in range(3)]
