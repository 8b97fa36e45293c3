"""The code of runs: files, changes, differences, and archives that are damaged or foreign."""

import io
import tarfile

import pytest
from tests.unit.dashboard.conftest import client_of, write_code

from telescope.dashboard import code
from telescope.record.recorder import Recorder


@pytest.fixture
def two(tmp_path):
    """Requests to the runs `a` and `b`, and their folders."""
    for name in ("a", "b"):
        Recorder(tmp_path / name).close()
    return client_of(tmp_path), tmp_path / "a", tmp_path / "b"


def archive(run, attempt=1):
    return run / "code" / f"attempt-{attempt}.tar.gz"


def test_the_code_of_a_run_has_git_state_changes_and_files(two):
    client, run, _ = two
    files = {"sources/train.py": "x = 1\n", "changes.diff": "-x = 0\n+x = 1\n"}
    write_code(archive(run), files, {"branch": "main"})
    body = client.get("/api/runs/a/code").json()
    assert body["git"] == {"commit": "c0ffee", "branch": "main"}
    assert body["left_out"] == ["data.bin (9 bytes)"]
    assert body["changes"] == "-x = 0\n+x = 1\n"
    assert body["files"] == [{"path": "sources/train.py", "size": 6}]
    read = client.get("/api/runs/a/code/file?path=sources/train.py").json()
    assert read == {"path": "sources/train.py", "size": 6, "text": "x = 1\n"}


def test_each_attempt_has_its_own_code(two):
    client, run, _ = two
    for attempt in (1, 2, 10):
        write_code(archive(run, attempt), {"sources/a": str(attempt)})
    newest = client.get("/api/runs/a/code").json()
    assert (newest["attempts"], newest["attempt"]) == ([1, 2, 10], 10)
    assert client.get("/api/runs/a/code/file?path=sources/a&attempt=2").json()["text"] == "2"
    assert client.get("/api/runs/a/code?attempt=3").status_code == 404


def test_a_run_without_code_says_so_and_a_binary_file_has_no_text(two):
    client, run, _ = two
    assert client.get("/api/runs/a/code").json()["attempt"] is None
    assert "no code" in client.get("/api/runs/a/code/file?path=x").json()["detail"]
    write_code(archive(run), {"a": b"\0\1", "b": b"\xff\xfe"})
    for path in ("a", "b"):
        assert client.get(f"/api/runs/a/code/file?path={path}").json()["text"] is None


@pytest.mark.parametrize("path", ["/etc/passwd", "../run.json", "sources/../git.json", "git.json", ""])
def test_only_files_of_the_archive_are_read(two, path):
    client, run, _ = two
    write_code(archive(run), {"sources/a": "1"})
    assert client.get("/api/runs/a/code/file", params={"path": path}).status_code == 404


def test_links_of_a_foreign_archive_are_not_followed(two, tmp_path):
    client, run, _ = two
    (tmp_path / "secret").write_text("secret")
    archive(run).parent.mkdir()
    with tarfile.open(archive(run), "w:gz") as made:
        link = tarfile.TarInfo("sources/link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        made.addfile(link)
        made.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    assert [row["path"] for row in client.get("/api/runs/a/code").json()["files"]] == ["../outside"]
    assert not (run.parent / "outside").exists()


def test_files_that_differ_have_a_unified_diff(two):
    client, one, other = two
    write_code(archive(one), {"same": "1", "gone": "a\nb\n", "changed": "1\n2\n3\n"})
    write_code(archive(other), {"same": "1", "new": "c\n", "changed": "1\n2!\n3\n"})
    body = client.get("/api/runs/b/code/diff?against=a").json()
    rows = {row.pop("path"): row for row in body["files"]}
    assert body["num_equal"] == 1
    diff = "@@ -1,3 +1,3 @@\n 1\n-2\n+2!\n 3"
    assert rows["changed"] == {"status": "changed", "added": 1, "removed": 1, "diff": diff}
    assert rows["new"].items() >= {"status": "added", "added": 1, "removed": 0}.items()
    assert rows["gone"].items() >= {"status": "removed", "added": 0, "removed": 2}.items()


def test_a_large_answer_lists_files_whose_diff_is_asked_for_alone(two, monkeypatch):
    client, one, other = two
    write_code(archive(one), {})
    write_code(archive(other), {"a": "1\n", "b": "2\n"})
    monkeypatch.setattr(code, "MAX_ANSWER_BYTES", 5)
    rows = client.get("/api/runs/b/code/diff?against=a").json()["files"]
    assert [row["diff"] is None for row in rows] == [False, True]
    (row,) = client.get("/api/runs/b/code/diff?against=a&path=b").json()["files"]
    assert row["diff"] == "@@ -0,0 +1 @@\n+2"


def test_files_of_many_lines_are_not_compared_by_line(two, monkeypatch):
    client, *runs = two
    monkeypatch.setattr(code, "MAX_DIFF_LINES", 3)
    for run, text in zip(runs, ("1\n2\n", "1\n3\n"), strict=True):
        write_code(archive(run), {"a": text})
    (row,) = client.get("/api/runs/b/code/diff?against=a").json()["files"]
    assert (row["status"], row["diff"]) == ("changed", None)


def test_a_damaged_archive_or_one_that_unpacks_to_too_much_is_refused(two, monkeypatch):
    client, run, other = two
    for folder in (run, other):
        write_code(archive(folder), {"a": "1" * 1000})
    archive(run).write_bytes(archive(run).read_bytes()[:100])
    answer = client.get("/api/runs/a/code")
    assert answer.status_code == 400 and "attempt-1.tar.gz cannot be read" in answer.json()["detail"]
    monkeypatch.setattr(code, "MAX_TOTAL_BYTES", 999)
    assert "holds more than" in client.get("/api/runs/b/code").json()["detail"]


def test_few_archives_stay_in_memory(two):
    _, run, _ = two
    for attempt in range(1, code.NUM_ARCHIVES + 3):
        write_code(archive(run, attempt), {"a": str(attempt)})
        assert code.snapshot_of(code.Run(run), attempt).files == {"a": str(attempt).encode()}
    assert code._read.cache_info().currsize == code.NUM_ARCHIVES
