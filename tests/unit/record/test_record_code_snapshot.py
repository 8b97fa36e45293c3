"""The snapshot of a run's code has the sources and the changes, and nothing that must not be copied."""

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from telescope.config.sections.record import CODE_EXCLUDE_PATTERNS
from telescope.record.code_snapshot import CodeSnapshot, git_state


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "pkg" / "__pycache__").mkdir(parents=True)
    files = {
        "pkg/a.py": "x = 1\n", ".gitignore": "ignored.py\n", "tracked.env": "", "notes.txt": "old\n", ".env": "KEY=1\n",
        "pkg/__pycache__/a.pyc": "", "big.py": "#" * 3000,
    }  # fmt: skip
    for name, text in files.items():
        (root / name).write_text(text)
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "-f", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    url = "https://user:secret@host/a.git"
    subprocess.run([*git, "config", "remote.origin.url", url], check=True)
    (root / "notes.txt").write_text("new\n")
    (root / ".env").write_text("KEY=2\n")
    (root / "untracked.py").write_text("y = 2\n")
    (root / "ignored.py").write_text("z = 3\n")
    (root / "outputs" / "run" / "tables").mkdir(parents=True)
    for name in ("run.json", "tables/rows.arrow"):
        (root / "outputs" / "run" / name).write_text("{}")
    return root


def members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]


def snapshot(path: Path, start: Path, *folders: Path, max_bytes: int = 2000) -> dict[str, str]:
    CodeSnapshot(max_bytes, CODE_EXCLUDE_PATTERNS).write(path, start, folders)
    return members(path)


def test_the_snapshot_has_tracked_and_new_sources_and_the_changes(checkout: Path, tmp_path: Path) -> None:
    found = snapshot(tmp_path / "code" / "attempt-1.tar.gz", checkout / "pkg")
    sources = {name.removeprefix("sources/") for name in found if name.startswith("sources/")}
    assert sources == {"pkg/a.py", ".gitignore", "notes.txt", "tracked.env", "untracked.py"}
    assert found["sources/notes.txt"] == "new\n"
    assert not any("outputs" in each for each in found), "runs that git does not ignore would fill the snapshot"
    assert "-old\n+new" in found["changes.diff"]
    assert "KEY=" not in "".join(found.values()), "neither a secret nor its change"
    described = json.loads(found["git.json"])
    assert (described["commit"], described["dirty"]) == git_state(checkout)
    assert described["remote"] == "https://host/a.git"
    left_out = [name for name in described["left_out"] if name.startswith("sources/")]
    assert left_out == ["sources/big.py (3000 bytes)"]


@pytest.mark.parametrize("setting", ["diff.mnemonicPrefix=true", "diff.noprefix=true"])
def test_names_of_changed_files_do_not_depend_on_settings_of_git(checkout: Path, tmp_path: Path, setting: str) -> None:
    subprocess.run(["git", "-C", str(checkout), "config", *setting.split("=")], check=True)
    (checkout / "größe.py").write_text("a = 1\n")
    subprocess.run(["git", "-C", str(checkout), "add", "größe.py"], check=True)
    changes = snapshot(tmp_path / "attempt-1.tar.gz", checkout)["changes.diff"]
    assert "diff --git a/größe.py b/größe.py" in changes
    assert "+++ b/notes.txt" in changes


def test_a_slow_status_does_not_hide_the_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def slow(command: list[str], **options: object) -> object:
        if "status" in command:
            raise subprocess.TimeoutExpired(command, 5)
        return run(command, **options)  # type: ignore[call-overload]

    commit, _ = git_state(checkout)
    monkeypatch.setattr(subprocess, "run", slow)
    assert commit and git_state(checkout) == (commit, None)


def test_a_checkout_of_another_user_is_a_warning_with_the_fix(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a container has a folder of the host. Such a checkout could make git run its owner's programs."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    found = snapshot(tmp_path / "code" / "a.tar.gz", checkout, max_bytes=100_000)
    assert json.loads(found["git.json"])["commit"] is None
    assert f"git config --global --add safe.directory {checkout}" in caplog.text


def test_environments_elsewhere_and_an_installed_package_are_copied_too(checkout: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "game").mkdir(parents=True)
    (mine / "game" / "environment.py").write_text("class Game: ...\n")
    found = snapshot(tmp_path / "code" / "a.tar.gz", checkout, mine, checkout / "pkg", max_bytes=100_000)
    assert found["environments/0/game/environment.py"] == "class Game: ...\n"
    assert "environments/1/a.py" not in found, "it is below the checkout"
    assert "telescope/record/code_snapshot.py" in found


def test_outside_a_checkout_the_package_is_all_there_is(tmp_path: Path) -> None:
    found = snapshot(tmp_path / "code" / "a.tar.gz", tmp_path, max_bytes=100_000)
    assert json.loads(found["git.json"])["commit"] is None
    assert {name.split("/")[0] for name in found} == {"git.json", "telescope"}


def test_a_removed_run_directory_is_not_created_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        snapshot(tmp_path / "gone" / "code" / "a.tar.gz", tmp_path)
    assert not (tmp_path / "gone").exists()
