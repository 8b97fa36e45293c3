"""Packages of the system are installed only on request."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.repository_modules import load_script


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script on a machine without Chromium, whose apt-get installs one and writes down its arguments."""
    apt = tmp_path / "apt-get"
    apt.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/commands\n'
        f'if [ "$1" = install ]; then printf "#!/bin/sh" > {tmp_path}/chromium; /bin/chmod +x {tmp_path}/chromium; fi\n'
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.setenv("CHROMIUM", "1")
    monkeypatch.delenv("BUBBLEWRAP", raising=False)  # set where `make test` runs these tests
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with load_script("install_packages") as module:
        yield module


def commands(tmp_path: Path) -> list[str]:
    return (tmp_path / "commands").read_text().splitlines() if (tmp_path / "commands").exists() else []


def test_a_missing_browser_is_installed_when_wanted(script: ModuleType, tmp_path: Path):
    assert "installed Chromium" in script.install("CHROMIUM")
    assert commands(tmp_path) == ["update", "install --yes --no-install-recommends chromium fonts-dejavu-core"]
    assert script.install("CHROMIUM") is None
    assert len(commands(tmp_path)) == 2


@pytest.mark.parametrize("value", ["", "0", None])
def test_nothing_is_installed_unasked(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
):
    monkeypatch.delenv("CHROMIUM") if value is None else monkeypatch.setenv("CHROMIUM", value)
    assert script.install("CHROMIUM") is None
    assert commands(tmp_path) == []


def test_without_root_the_error_names_what_to_do_and_make_test_leaves_the_pages_out(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(script.InstallError, match=r"CHROMIUM=1 needs root.*playwright install chromium"):
        script.install("CHROMIUM")
    monkeypatch.setenv("CHROMIUM", "auto")
    assert script.install("CHROMIUM") is None


def test_another_value_is_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CHROMIUM", "yes")
    with pytest.raises(script.InstallError, match="CHROMIUM=yes must be 0, 1 or auto"):
        script.install("CHROMIUM")


def test_a_failed_install_shows_what_apt_get_said(script: ModuleType, tmp_path: Path):
    (tmp_path / "apt-get").write_text("#!/bin/sh\necho E: no space left >&2\nexit 100\n")
    with pytest.raises(script.InstallError, match="no space left"):
        script.install("CHROMIUM")


def test_each_need_has_its_own_variable(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert script.install("BUBBLEWRAP") is None
    monkeypatch.setenv("BUBBLEWRAP", "1")
    with pytest.raises(script.InstallError, match="bubblewrap that is no command"):
        script.install("BUBBLEWRAP")
    assert commands(tmp_path)[1] == "install --yes --no-install-recommends bubblewrap"
