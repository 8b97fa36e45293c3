"""Cache of built tiny models, one folder per settings.

Invariants: a folder with its final name is complete, because it is filled under another name and then renamed; a folder
whose files do not match their checksums is removed and built again. Of two processes that build the same model at the
same time, both get the folder of the one that finished first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.errors import UserError
from telescope.tiny_model.settings import TinyModelSettings

if TYPE_CHECKING:
    from telescope.tiny_model.warm_start import WarmStartProgress

MANIFEST = "tiny_model.json"
"""Settings of the model, and the SHA-256 of every other file beside it."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/telescope`, or `~/.cache/telescope`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "telescope"


def ensure_tiny_model(
    cache_dir: Path | str | None = None,
    *,
    seed: int = 0,
    tied: bool = False,
    report: Callable[[WarmStartProgress], None] | None = None,
    **other_settings: Any,
) -> Path:
    """Returns the folder of the tiny model with these settings. Builds it unless the cache has a complete one.

    `other_settings` are fields of `TinyModelSettings`. `report` is called after every warm-start step, so never when
    the cache answers. Raises `UserError` for settings that make no model or a cache folder that cannot be written.
    """
    settings = TinyModelSettings(seed=seed, tied=tied, **other_settings)
    root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    return _ensure(root / f"tiny-model-{settings.key}", settings, report)


def write_tiny_model(
    target: Path, settings: TinyModelSettings, *, report: Callable[[WarmStartProgress], None] | None = None
) -> Path:
    """Builds the model in a folder of the caller's choice.

    A tiny model with other settings is replaced; anything else in that place is refused with `UserError`.
    """
    mine = (target / MANIFEST).is_file() or (target.is_dir() and not any(target.iterdir()))
    if target.exists() and not mine:
        raise UserError(f"{target} exists and is not a tiny model: choose another folder or remove it.")
    return _ensure(target, settings, report)


def _ensure(target: Path, settings: TinyModelSettings, report: Callable[[WarmStartProgress], None] | None) -> Path:
    if is_whole(target, settings):
        return target
    from telescope.tiny_model.build import build_tiny_model  # torch and transformers: only when needed

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise UserError(
            f"cannot write a tiny model to {target.parent} ({error.strerror}): name another folder"
        ) from error
    try:
        scratch.chmod(0o755)
        build_tiny_model(scratch, settings, report)
        manifest = {"key": settings.key, "settings": asdict(settings), "files": _checksums(scratch)}
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _install(scratch, target, settings)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def is_whole(folder: Path, settings: TinyModelSettings) -> bool:
    """Returns whether `folder` has the model of these settings with intact files."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = dict(manifest["files"])
        return manifest["key"] == settings.key and bool(files) and files == _checksums(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False  # Absent or unreadable is the same as broken here: the caller builds it again.


def _checksums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST
    }


def _install(scratch: Path, target: Path, settings: TinyModelSettings) -> None:
    """Renames the finished folder, replacing a broken one."""
    for _ in range(2):
        try:
            scratch.rename(target)
            return
        except OSError:  # Something is there: ours from another process, or the broken one.
            if is_whole(target, settings):
                return
            away = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            target.rename(away / "broken")
            shutil.rmtree(away, ignore_errors=True)
    scratch.rename(target)
