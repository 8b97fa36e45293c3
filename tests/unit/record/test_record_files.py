"""A small file is replaced as a whole, by bytes or by the JSON of any value."""

import json
import math

import numpy as np
import pytest

from telescope.record.files import read_json, replace_file, replace_json


@pytest.mark.parametrize(("value", "expected"), [
    ({"rows": [{"a": 1, "b": None, "c": "\u00e9\u4e2d"}]}, None),
    ({"array": np.array([1, 2]), "number": np.float32(0.5)}, {"array": [1, 2], "number": 0.5}),
    ({"lone surrogate": "\ud800"}, None),
])  # fmt: skip
def test_values_are_read_back_as_they_were(tmp_path, value, expected):
    path = tmp_path / "file.json"
    replace_json(path, value)
    assert read_json(path) == (value if expected is None else expected)


def test_infinity_and_nan_are_read_back(tmp_path):
    replace_json(tmp_path / "file.json", [math.nan, math.inf])
    nan, infinite = json.loads((tmp_path / "file.json").read_text())
    assert math.isnan(nan)
    assert infinite == math.inf


def test_an_open_file_keeps_its_old_content(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        replace_file(path, b"new and longer")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new and longer"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_only_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(self, content):
        with open(self, "wb") as file:
            file.write(content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
