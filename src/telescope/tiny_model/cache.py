"""Settings of tiny models, and the cache of built and released models, with a folder per combination of settings.

Equal keys give the same model on the same machine, because every random choice of the build depends on `seed`.
Invariants: a folder with its final name is complete, because it is filled under another name and then renamed. A folder
whose files do not match their checksums is removed and built again. If two processes build the same model at the same
time, both get the folder of the process that finished first.
"""

import hashlib
import json
import math
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from telescope.errors import UserError
from telescope.utils.digests import digests_of
from telescope.utils.text import home_folder


@dataclass(frozen=True, slots=True)
class WarmStartProgress:
    """Progress of the warm start. `step` of `num_steps` is done, with the mean loss per answer token (nats)."""

    step: int
    num_steps: int
    loss: float


Report = Callable[[WarmStartProgress], None] | None
"""Called after every step of a warm start."""

RECIPE_VERSIONS = MappingProxyType({"countdown": 1, "calculator_agent": 2, "mixed": 1})
"""Part of the cache key, by task. Raise it when the code builds another model from the same settings."""

TASKS = tuple(RECIPE_VERSIONS)

MIN_VOCAB_SIZE = 265
"""256 bytes, the seven special and markup tokens of the tokenizer, and two of a task's own."""

_HEAD_SIZES = (32, 64, 96, 128)
"""Widths of a head that the engine's attention handles on CPU and GPU alike."""


@dataclass(frozen=True, slots=True)
class ModelRecipe(ABC):
    """A way to create a model folder. Equal keys create equal folders."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Returns the folder's name in the cache, after `tiny-model-`."""

    @abstractmethod
    def build(self, folder: Path, report: Report) -> None:
        """Writes config, weights, tokenizer and chat template into an empty folder."""


def _setting(default: Any, explanation: str, least: float | None = None, most: float | None = None) -> Any:
    """Returns a field of `TinyModelSettings` with its help text and bounds."""
    return field(default=default, metadata={"help": explanation, "range": (least, most)})


@dataclass(frozen=True, slots=True)
class TinyModelSettings(ModelRecipe):
    """Shape, data and length of the warm start. The defaults are those that `make demo` trains."""

    task: str = _setting("countdown", "task of the warm start: countdown, calculator_agent or mixed (both)")
    seed: int = _setting(0, "seed of all random choices of the build", 0, 2**63 - 1)
    tied: bool = _setting(False, "input and output embeddings are one tensor")
    """Weight updates differ between tied and separate embeddings, so both kinds are supported."""

    hidden_size: int = _setting(128, "width of the model", 1)
    num_layers: int = _setting(4, "transformer layers", 1)
    num_heads: int = _setting(4, "attention heads", 1)
    num_kv_heads: int = _setting(2, "heads of keys and values", 1)
    intermediate_size: int = _setting(512, "width inside the feed-forward layers", 1)
    vocab_size: int = _setting(384, "largest number of tokens of the tokenizer", MIN_VOCAB_SIZE)
    max_position_embeddings: int = _setting(2048, "longest context, in tokens", 64)

    num_numbers: int = _setting(3, "numbers in a puzzle", 2, 6)
    """Puzzles add and subtract them. Calculator questions have up to this many, and also multiply."""
    max_number: int = _setting(10, "largest number in a puzzle", 2)
    num_turns: int = _setting(1, "puzzles in one conversation", 1, 8)
    """Does not apply to the calculator, whose questions determine the number of turns."""

    warm_start_steps: int = _setting(560, "supervised steps; 0 leaves the weights random", 0)
    warm_start_batch_size: int = _setting(32, "answers in a step", 1)
    """Answers come from conversations of one or more turns. Only answers are trained."""
    warm_start_learning_rate: float = _setting(2e-3, "peak of the schedule", 1e-9)
    wrong_share: float = _setting(0.7, "share of arbitrary answers in the last part of the warm start", 0, 1)
    clean_share: float = _setting(0.75, "share of the steps that comes before that part", 0, 1)
    """The first `clean_share` of the steps shows right answers only; in the rest, a share of `wrong_share` (of answers
    or, for the calculator, that many turns of a conversation) is in the right form and arbitrary otherwise. The model
    then knows more than its answers show: they are varied and mostly wrong, so that reinforcement learning can tell
    right from wrong ones."""

    def __post_init__(self) -> None:
        """Raises `UserError` for values that cannot make a model."""
        self._require(self.task in TASKS, "task", f"use one of {', '.join(TASKS)}")
        for setting in fields(self):
            least, most = setting.metadata["range"]
            if least is not None:
                holds = least <= getattr(self, setting.name) <= (math.inf if most is None else most)
                self._require(holds, setting.name, f"use {least} {'or more' if most is None else f'to {most}'}")
        head_size, rest = divmod(self.hidden_size, self.num_heads)
        widths = ", ".join(map(str, _HEAD_SIZES))
        fix = f"with num_heads {self.num_heads} it must give heads of a width among {widths}"
        self._require(rest == 0 and head_size in _HEAD_SIZES, "hidden_size", fix)
        fix = f"it must divide num_heads, {self.num_heads}"
        self._require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", fix)

    def _require(self, holds: bool, name: str, fix: str) -> None:
        if not holds:
            raise UserError(f"tiny model: {name} is {getattr(self, name)}; {fix}.")

    @property
    def key(self) -> str:
        """Returns 16 hexadecimal digits of these settings and the recipe's version."""
        fields = asdict(self)
        for name, first in (("task", TASKS[0]), ("num_turns", 1)):
            if fields[name] == first:
                del fields[name]  # models from before this setting existed keep their key
        text = json.dumps({"recipe": RECIPE_VERSIONS[self.task], **fields}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def build(self, folder: Path, report: Report) -> None:
        """Creates the model and trains its warm start."""
        from telescope.tiny_model.build import build_tiny_model  # imports torch and transformers only when needed

        build_tiny_model(folder, self, report)


MANIFEST = "tiny_model.json"
"""Settings of the model, and the SHA-256 of every other file beside it."""


def ensure_tiny_model(cache_dir: Path | str | None = None, *, report: Report = None, **settings: Any) -> Path:
    """Returns the folder of the tiny model with these settings. Builds it unless it is complete in the cache.

    `settings` are fields of `TinyModelSettings`. `report` is called after every warm-start step, so never if the model
    is cached. Raises `UserError` for settings that make no model or a cache folder that cannot be written.
    """
    return ensure_model(TinyModelSettings(**settings), cache_dir, report=report)


def ensure_model(recipe: ModelRecipe, cache_dir: Path | str | None = None, *, report: Report = None) -> Path:
    """Returns the model's folder in the cache, by default below `~/.cache`. Builds it unless it is complete."""
    root = home_folder("XDG_CACHE_HOME", ".cache") if cache_dir is None else Path(cache_dir)
    return _ensure(root / f"tiny-model-{recipe.key}", recipe, report)


def write_tiny_model(target: Path, recipe: ModelRecipe, *, report: Report = None) -> Path:
    """Builds the model in a folder that the caller chooses.

    Replaces another model of this command. Refuses anything else in that place with `UserError`.
    """
    mine = (target / MANIFEST).is_file() or (target.is_dir() and not any(target.iterdir()))
    if target.exists() and not mine:
        raise UserError(f"{target} exists and is not a tiny model: choose another folder or remove it.")
    return _ensure(target, recipe, report)


def _ensure(target: Path, recipe: ModelRecipe, report: Report) -> Path:
    if is_whole(target, recipe):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise UserError(
            f"cannot write a tiny model to {target.parent} ({error.strerror}): name another folder"
        ) from error
    try:
        scratch.chmod(0o755)
        recipe.build(scratch, report)
        manifest = {"key": recipe.key, "settings": asdict(recipe), "files": _checksums(scratch)}
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if not is_whole(target, recipe):
            shutil.rmtree(target, ignore_errors=True)  # the broken one
        try:
            scratch.rename(target)
        except OSError:  # another process has built it
            if not is_whole(target, recipe):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def is_whole(folder: Path, recipe: ModelRecipe) -> bool:
    """Returns whether `folder` has this recipe's model with intact files."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = dict(manifest["files"])
        return manifest["key"] == recipe.key and bool(files) and files == _checksums(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False  # Missing or unreadable counts as broken: the caller builds it again.


def _checksums(folder: Path) -> dict[str, str]:
    return digests_of(folder, {path.name for path in folder.iterdir() if path.is_file()} - {MANIFEST})
