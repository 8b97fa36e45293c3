"""The set-up script without installing: detection, repeated runs, options of uv."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.repository_modules import ROOT, load_script


@pytest.fixture(scope="module")
def set_up() -> Iterator[ModuleType]:
    with load_script("set_up") as module:
        yield module


def put_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """A command that shadows the machine's own."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(("script", "kind"), [
    (None, "cpu"),
    ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'", "cuda"),
    ("echo 'No devices found.'", "cpu"),
    ("echo 'has failed because it could not communicate with the NVIDIA driver'; exit 9", "cpu"),
])  # fmt: skip
def test_a_gpu_is_what_the_driver_lists(
    set_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, kind: str
):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        put_on_path(tmp_path, monkeypatch, "nvidia-smi", script)
    assert set_up.find_kind() == kind


def test_pips_configuration_is_passed_to_uv(set_up: ModuleType):
    options, environment = set_up.uv_options({
        "index-url": "https://a/simple", "extra-index-url": "https://b/simple\nhttps://c/simple", "find-links": "/w",
        "cert": "/ca.pem", "default-timeout": "180", "no-index": "0",
    })  # fmt: skip
    assert options == [
        "--index-strategy", "unsafe-best-match", "--default-index", "https://a/simple", "--index", "https://b/simple",
        "--index", "https://c/simple", "--find-links", "/w",
    ]  # fmt: skip
    assert environment == {"SSL_CERT_FILE": "/ca.pem"}


def test_configuration_unknown_to_uv_is_left_to_pip(set_up: ModuleType):
    with pytest.raises(set_up.SetUpError, match="client-cert"):
        set_up.uv_options({"client-cert": "/me.pem"})


PIP_CONFIGURATION = r"""
install.find-links='/from-the-section'
global.find-links='/from-the-file'
:env:.find-links='/from-env'
global.index-url='https://a/simple'
list.format='columns'
"""


def test_the_environment_of_pip_wins_over_its_files(
    set_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put_on_path(tmp_path, monkeypatch, "python", f'echo "{PIP_CONFIGURATION.strip()}"')
    monkeypatch.setattr(set_up, "VENV_PYTHON", tmp_path / "bin" / "python")
    assert set_up.pip_configuration() == {"find-links": "/from-env", "index-url": "https://a/simple"}


def test_a_finished_set_up_is_not_repeated_until_a_file_changes(
    set_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    done: list[str] = []
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    for name in ("cpu.txt", "dev.txt"):
        (requirements / name).write_text("torch==2.13.0\n")
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    monkeypatch.setattr(set_up, "STAMP", tmp_path / ".venv" / "stamp.json")
    monkeypatch.setattr(set_up, "environment_works", lambda: True)
    monkeypatch.setattr(set_up, "make_installer", lambda pins, use_pip: set_up.Installer(["true"], {}, "none"))
    monkeypatch.setattr(set_up, "install_packages", lambda *_: done.append("packages"))
    monkeypatch.setattr(set_up, "check_imports", lambda: done.append("imports"))
    monkeypatch.setattr(set_up, "describe_environment", lambda: "")

    set_up.set_up("cpu", use_pip=False)
    assert done == ["packages", "imports"]
    set_up.set_up("cpu", use_pip=False)
    assert done == ["packages", "imports"]
    (tmp_path / "pyproject.toml").write_text("[project]")
    set_up.set_up("cpu", use_pip=False)
    assert done == ["packages", "imports"]  # only the checkout was installed again
    (requirements / "cpu.txt").write_text("torch==2.13.1\n")
    set_up.set_up("cpu", use_pip=False)
    assert done == ["packages", "imports"] * 2


def test_cpu_torch_is_requested_by_name_from_the_users_index_first(
    set_up: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    calls: list[tuple[str, ...]] = []

    class Recorder(set_up.Installer):  # type: ignore[misc, name-defined]
        def __init__(self, has_cpu_build: bool) -> None:
            self.has_cpu_build = has_cpu_build

        def install(self, *arguments: str, quiet_failure: bool = False) -> bool:
            calls.append(arguments)
            return self.has_cpu_build or "torch==2.13.0+cpu" not in arguments

    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    set_up.install_cpu_torch("torch==2.13.0", Recorder(has_cpu_build=True))
    assert calls == [("--no-deps", "torch==2.13.0+cpu")]

    calls.clear()
    set_up.install_cpu_torch("torch==2.13.0", Recorder(has_cpu_build=False))
    assert calls == [("--no-deps", "torch==2.13.0+cpu"), ("torch==2.13.0",)]
    assert "TORCH_INDEX_URL" in capsys.readouterr().out

    calls.clear()
    monkeypatch.setenv("TORCH_INDEX_URL", "https://index.example/cpu")
    set_up.install_cpu_torch("torch==2.13.0", Recorder(has_cpu_build=True))
    assert calls == [("--no-deps", "torch==2.13.0+cpu", "--extra-index-url", "https://index.example/cpu")]
    with pytest.raises(set_up.SetUpError, match=r"index\.example"):
        set_up.install_cpu_torch("torch==2.13.0", Recorder(has_cpu_build=False))


def start_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(ROOT / "scripts" / "set_up.sh"), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)


def test_without_a_supported_python_the_error_names_what_to_install(tmp_path: Path):
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python"):
        (tmp_path / name).write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 && exit 0\nexit 1\n')
        (tmp_path / name).chmod(0o755)
    finished = start_script(PATH=f"{tmp_path}:/usr/bin:/bin")
    assert finished.returncode == 2
    assert "Python 3.9.2" in finished.stderr
    assert "apt install" in finished.stderr


def test_a_named_python_may_have_a_space_in_its_path_and_is_refused_unless_it_fits(tmp_path: Path):
    refused = start_script(PATH=os.environ["PATH"], PYTHON="/bin/false")
    assert refused.returncode == 2 and "PYTHON=/bin/false" in refused.stderr
    python = tmp_path / "my python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$@"\n')
    python.chmod(0o755)
    assert start_script("--x", PATH=os.environ["PATH"], PYTHON=str(python)).stdout == "scripts/set_up.py --x\n"


def test_without_venv_the_error_names_its_package(set_up: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(set_up, "environment_works", lambda: False)
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(set_up.SetUpError, match=r"apt install python3\.\d+-venv"):
        set_up.make_environment()
