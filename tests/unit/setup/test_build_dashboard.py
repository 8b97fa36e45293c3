"""The build of the dashboard's pages without npm: when it runs, and what it says without Node.js."""

import zipfile
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path
from types import ModuleType

import pytest
from tests.repository_modules import load_script


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with load_script("build_dashboard") as module:
        sources, built, programs = tmp_path / "dashboard", tmp_path / "static", tmp_path / "bin"
        (sources / "src").mkdir(parents=True)
        (sources / "node_modules").mkdir()
        programs.mkdir()
        built.mkdir()
        (sources / "package-lock.json").write_text("{}")
        (sources / "src" / "a.ts").write_text("1")
        monkeypatch.setattr(module, "SOURCES", sources)
        monkeypatch.setattr(module, "BUILT", built)
        monkeypatch.setattr(module, "RELEASE", (tmp_path / "release.zip").as_uri())
        monkeypatch.setenv("PATH", str(programs))
        yield module


def put(build: ModuleType, name: str, script: str) -> None:
    path = build.SOURCES.parent / "bin" / name
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    path.chmod(0o755)


def calls(build: ModuleType) -> list[str]:
    path = build.SOURCES.parent / "calls"
    return path.read_text().splitlines() if path.exists() else []


def use_fake_npm(build: ModuleType, version: str = "v22.1.0") -> None:
    put(build, "node", f"echo {version}")
    put(build, "npm", f'echo "$1 $2" >> {build.SOURCES.parent}/calls')


def test_unchanged_sources_are_not_built_again(build: ModuleType):
    use_fake_npm(build)
    assert build.build().startswith("built the dashboard")
    assert build.build() is None
    (build.SOURCES / "src" / "a.ts").write_text("2")
    assert build.build() is not None
    assert calls(build) == ["ci --no-fund", "run build", "run build"]


def test_changed_packages_are_installed_again(build: ModuleType):
    use_fake_npm(build)
    build.build()
    (build.SOURCES / "package-lock.json").write_text('{"a": 1}')
    build.build()
    assert calls(build).count("ci --no-fund") == 2


def test_an_old_node_is_named_with_the_fix(build: ModuleType):
    use_fake_npm(build, "v18.19.0")
    with pytest.raises(build.BuildError, match=r"Node\.js v18\.19\.0 is too old.*make dashboard.*cannot be downloaded"):
        build.build()


def test_without_node_the_pages_of_the_newest_release_are_taken_once(build: ModuleType):
    with zipfile.ZipFile(build.SOURCES.parent / "release.zip", "w") as release:
        release.writestr("index.html", "released")
        release.writestr("assets/a.js", "1")
    assert build.build().startswith("downloaded the pages of the newest release")
    assert (build.BUILT / "assets" / "a.js").is_file()
    (build.BUILT / "index.html").write_text("mine")
    assert "no Node.js found" in build.build()
    assert (build.BUILT / "index.html").read_text() == "mine"


def test_a_download_that_breaks_off_is_no_crash(build: ModuleType, monkeypatch: pytest.MonkeyPatch):
    def break_off(*_: object, **__: object) -> None:
        raise IncompleteRead(b"half")

    monkeypatch.setattr(build.urllib.request, "urlopen", break_off)
    with pytest.raises(build.BuildError, match="cannot be downloaded: IncompleteRead"):
        build.build()


def test_a_failed_build_shows_its_last_lines_and_is_tried_again(build: ModuleType):
    use_fake_npm(build)
    put(build, "npm", "echo src/a.ts: unexpected token; exit 1")
    with pytest.raises(build.BuildError, match="unexpected token"):
        build.build()
    use_fake_npm(build)
    assert build.build() is not None
