"""Digests of files."""

import pytest

from telescope.utils import digests


@pytest.mark.parametrize(("threshold", "is_announced"), [(2, True), (3, False)])
def test_comparing_large_files_is_announced(tmp_path, monkeypatch, capsys, threshold, is_announced):
    monkeypatch.setattr(digests, "ANNOUNCED_BYTES", threshold)
    (tmp_path / "shard").write_bytes(b"12")
    known = digests.digests_of(tmp_path, ["shard"])
    assert digests.damage(tmp_path, {**known, "gone": "0"}) == ["gone does not exist"]
    shown = f"{tmp_path}: comparing 2e-09 GB with the digests of when they were written\n"
    assert capsys.readouterr().err == (shown if is_announced else "")
    (tmp_path / "shard").write_bytes(b"13")
    assert digests.damage(tmp_path, known) == ["shard has changed since it was written"]
