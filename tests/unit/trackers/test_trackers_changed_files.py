"""Files of a record are copied once, and again when they change, but never what looks like a secret."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from telescope.trackers.wandb_files import BYTES_PER_SECOND, MANIFEST, ChangedFiles, RecordUpload, kind_of

ALL = ("record", "code", "logs", "logs_detailed", "logs_stdout")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    names = ("run.json", "tables/steps/0.parquet", "tables/logs/0.parquet", "tables/.writer.lock", "logs/driver.log")
    for name in (*names, "logs/trainer-0.log", "code/attempt-1.tar.gz", "checkpoints/step_1/weights", "wandb/x"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "tables" / "steps" / ".writing-1-x").write_text("incomplete")
    return tmp_path


def test_a_kind_that_the_config_leaves_out_is_not_copied(run_dir):
    names, sizes = ChangedFiles(run_dir, ("record",), 5.0).due(0.0)
    assert names == ["run.json", "tables/steps/0.parquet"]
    assert sizes == {"run.json": 8, "tables/steps/0.parquet": 22}
    names, _ = ChangedFiles(run_dir, ALL, 5.0).due(0.0)
    more = {"code/attempt-1.tar.gz", "logs/driver.log", "logs/trainer-0.log", "tables/logs/0.parquet"}
    assert set(names) == {"run.json", "tables/steps/0.parquet"} | more
    assert ChangedFiles(run_dir, (), 5.0).due(0.0) == ([], {})


def test_a_file_is_copied_once_and_again_when_it_changed(run_dir):
    files = ChangedFiles(run_dir, ("record",), 5.0)
    assert len(files.due(0.0)[0]) == 2
    assert files.due(100.0)[0] == []
    (run_dir / "run.json").write_text("ended")
    (run_dir / "summary.json").write_text("{}")
    assert files.due(101.0)[0] == ["run.json", "summary.json"]


def test_a_growing_file_waits_longer_the_larger_it_is(run_dir):
    files = ChangedFiles(run_dir, ("logs_detailed",), 5.0)
    log = run_dir / "logs" / "driver.log"
    files.due(0.0)
    log.write_bytes(b"x" * (20 * BYTES_PER_SECOND))
    assert files.due(6.0)[0] == []
    assert files.due(21.0)[0] == ["logs/driver.log"]
    log.write_bytes(b"y")
    assert files.due(23.0)[0] == [], "not before the interval"
    assert files.due(23.0, last=True)[0] == ["logs/driver.log"], "but at the end"


@pytest.mark.parametrize("name", ["code/.env", "tables/x/id_rsa", "credentials.json", "logs/wandb.log"])
def test_secrets_and_logs_of_other_processes_are_never_copied(name):
    assert kind_of(name) is None


@pytest.mark.parametrize("fails", ["list", "save"])
def test_files_of_a_failed_upload_are_uploaded_later(fails, run_dir, tmp_path_factory, monkeypatch):
    problems, saved = {fails}, []

    def attempt(what):
        if what in problems:
            problems.clear()
            raise OSError("the server does not answer")

    def save(path, base_path, policy):
        attempt("save")
        saved.append(Path(path).relative_to(base_path).as_posix())

    folder = tmp_path_factory.mktemp("wandb")
    upload = RecordUpload(SimpleNamespace(dir=str(folder), offline=False, save=save), str(run_dir), ("record",), 0.0)
    monkeypatch.setattr(upload, "_uploaded", lambda: attempt("list") or {})
    with pytest.raises(OSError, match="does not answer"):
        upload.upload(last=False)
    upload.upload(last=False)
    names = ["run.json", "tables/steps/0.parquet"]
    assert saved == [*(f"telescope/{name}" for name in names), MANIFEST]
    assert sorted(json.loads((folder / MANIFEST).read_text())["files"]) == names
