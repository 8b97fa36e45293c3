"""Finds a model's files in a folder, the cache, or the hub. The hub has short deadlines.

Owns reading them as text and as JSON. `model_files` checks what they hold. `huggingface_hub` is imported for
identifiers of the hub only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.config.messages import show
from telescope.errors import ConfigError
from telescope.utils.text import user_path

if TYPE_CHECKING:
    from telescope.config.model_shape import ModelShape
    from telescope.config.schema import TelescopeConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
META_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
"""Of the files beside the weights: config, tokenizer, chat template, generation config, the model's own code."""
HUB_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class ModelFiles:
    """A folder of model files, local or on the hub. `read` returns the text of a file in `names`."""

    where: str
    names: frozenset[str]
    read: Callable[[str], str]
    folder: Path | None = None
    """Folder on this machine; None for a repository that is not downloaded yet."""

    def read_object(self, name: str) -> Mapping[str, Any] | None:
        """Returns the object in a JSON file. None if there is no such file, or something else in it."""
        data = self._parse(name, json.loads) if name in self.names else None
        return data if isinstance(data, dict) else None

    def _parse(self, name: str, parse: Callable[[str], Any]) -> Any:
        try:
            return parse(self.read(name))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{name} of {self.where} cannot be read: {error}. Download or save it again") from None

    def chat_template(self) -> str | None:
        """Returns the tokenizer's default template, from any of its files."""
        if "chat_template.jinja" in self.names:
            return str(self._parse("chat_template.jinja", str))
        for name in ("chat_template.json", "tokenizer_config.json"):
            template = (self.read_object(name) or {}).get("chat_template")
            if isinstance(template, list):  # several, by name
                named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
                template = named.get("default")
            if isinstance(template, str) and template.strip():
                return template
        return None


class HubUnreachableError(Exception):
    """The hub did not answer, or `huggingface_hub` is not installed."""


def is_local_path(model: str) -> bool:
    """Returns whether `model` is a path, not `name` or `owner/name` on the hub, where no owner is called `models`."""
    return model.startswith(("/", ".", "~", "models/")) or model.count("/") > 1 or os.path.lexists(model)


def find_files(config: TelescopeConfig, *, ask_hub: bool) -> ModelFiles:
    """Returns the files of `config.model`. Raises `ConfigError` if there are none, `HubUnreachableError` if unknown."""
    return _local_files(config) if is_local_path(config.model) else _hub_files(config.model, ask_hub)


def is_downloaded(model: str) -> bool:
    """Returns whether this machine has all weight files of a model."""
    if is_local_path(model):
        return True
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "model.safetensors"), str):
        return True
    index = try_to_load_from_cache(model, "model.safetensors.index.json")
    if not isinstance(index, str):
        return False
    names = set(json.loads(Path(index).read_text()).get("weight_map", {}).values())
    return bool(names) and all((Path(index).parent / name).is_file() for name in names)


def files_here(config: TelescopeConfig) -> ModelFiles | None:
    """The model's files on this machine. None for a hub identifier that is not in the cache."""
    try:
        return find_files(config, ask_hub=False)
    except HubUnreachableError:
        return None


def architecture_of(config: TelescopeConfig) -> str | None:
    """The model's `model_type`, from files on this machine. None if they are not here."""
    files = files_here(config)
    model_type = None if files is None else (files.read_object("config.json") or {}).get("model_type")
    return model_type if isinstance(model_type, str) else None


def why_no_router_replay(config: TelescopeConfig, shape: ModelShape | None) -> str | None:
    """Returns why the model cannot be trained with `router_replay`, or None if it can. Unknown facts are no reason."""
    if shape is not None and not shape.num_experts:
        return f"{config.model} has no experts"
    if shape is not None and shape.experts_per_token < 2:
        return f"{config.model} has one expert per token"
    if architecture_of(config) not in (None, "qwen3_moe"):
        return f"it works for Qwen3-MoE, and {config.model} is another model"
    return None


def read_meta_files(config: TelescopeConfig) -> dict[str, bytes]:
    """Reads the model's files beside its weights: name to content. The run's `chat_template` replaces theirs.

    A folder of these files and of weights is a model in HuggingFace format. Empty for a hub model that is not cached,
    and for a folder that is gone. Raises `OSError`.
    """
    is_gone = is_local_path(config.model) and not Path(config.model).expanduser().is_dir()
    files = None if is_gone else files_here(config)
    if files is None or files.folder is None:
        return {}
    names = sorted(name for name in files.names if name.endswith(META_SUFFIXES) and not name.endswith(".index.json"))
    contents = {name: (files.folder / name).read_bytes() for name in names}
    if config.chat_template is not None:
        contents["chat_template.jinja"] = config.chat_template.encode()  # comes before that of tokenizer_config.json
    return contents


def _local_files(config: TelescopeConfig) -> ModelFiles:
    model = config.model
    folder = user_path(model)
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        if problem == "does not exist" and "tiny" in folder.name:
            calculator = any(entry.name == "calculator_agent" for entry in config.environments)
            task = " --task calculator_agent" if calculator else ""
            fix = f"Make the model of the demo there: `telescope tiny-model{task} --output {model}`"
        elif problem == "does not exist" and folder.name == "smollm2-135m":
            fix = f"Download it: `telescope tiny-model --from {folder.name} --output {model}`"
        else:
            fix = "Give a folder in HuggingFace format, or a hub identifier such as Qwen/Qwen2.5-3B"
        raise ConfigError(f"model is {model!r}, but {folder} {problem}. {fix}")
    try:
        return files_in(folder, str(folder))
    except OSError as error:
        raise ConfigError(f"model is {model!r}, which cannot be read ({error.strerror}). Change its mode") from error


def files_in(folder: Path, where: str) -> ModelFiles:
    """Returns the files in a folder, which the errors call `where`."""
    names = frozenset(item.name for item in folder.iterdir() if item.is_file())
    return ModelFiles(where, names, lambda name: (folder / name).read_text(encoding="utf-8"), folder)


def read_config(model: str) -> Mapping[str, Any] | None:
    """Returns the `config.json` of a folder, or of a name on the hub. None if there is none, or it cannot be read."""
    try:
        files = files_in(Path(model), model) if is_local_path(model) else _hub_files(model, ask_hub=True)
        return files.read_object("config.json")
    except (OSError, ConfigError, HubUnreachableError):
        return None


def _hub_files(model: str, ask_hub: bool) -> ModelFiles:
    """Files of a hub repository, from the cache or the hub. The cache comes first."""
    try:
        import huggingface_hub
    except ImportError:
        raise HubUnreachableError("the hub cannot be asked without huggingface_hub installed") from None
    with _hub_errors(model, "its cache cannot be read"):
        cached = huggingface_hub.try_to_load_from_cache(model, "config.json")
    if isinstance(cached, str):
        files = files_in(Path(cached).parent, f"the hub cache of {model}")
        if files.names & set(TOKENIZER_FILES):
            return files
    if not ask_hub:
        raise HubUnreachableError("the hub's cache does not hold it")
    with _hub_errors(model, "it is not in the hub's cache, and the hub cannot be reached"):
        info = huggingface_hub.HfApi().model_info(model, timeout=HUB_TIMEOUT_SECONDS)

    def read(name: str) -> str:
        with _hub_errors(model, f"{name} cannot be downloaded"):
            path = huggingface_hub.hf_hub_download(model, name, etag_timeout=HUB_TIMEOUT_SECONDS)
        return Path(path).read_text(encoding="utf-8")

    names = frozenset(sibling.rfilename for sibling in info.siblings or [])
    return ModelFiles(f"the hub repository {model}", names, read)


@contextmanager
def _hub_errors(model: str, problem: str) -> Iterator[None]:
    """Raises the errors of huggingface_hub as `ConfigError`, or else as `HubUnreachableError` with `problem`."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError:
        raise ConfigError(
            f"model is {show(model)}, which is neither a folder here nor a hub identifier: those are letters, "
            "digits, '-', '_' and '.', at most 96 of them, as in Qwen/Qwen2.5-3B. Check the spelling, or give a path"
        ) from None
    except errors.GatedRepoError:  # anyone may list the files of such a repository
        raise ConfigError(
            f"model is {model!r}, which the hub gives only to accounts that were granted access. Ask for it on the "
            "model's page and log in with `hf auth login`, or choose another model"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"model is {model!r}, but there is no such repository on the hub (or it is private and you are not logged "
            "in), and no such folder here. Check the spelling, or give a path"
        ) from None
    except Exception as error:  # every transport has exceptions of its own, and each means the same here
        raise HubUnreachableError(f"{problem} ({type(error).__name__})") from None
