"""Loads a configuration from defaults, environment variables, YAML and flags.

Later layers win, in that order. Owns the syntax of flags. Does not own files (`yaml_file`), valid values (`sections`),
rules between fields (`rules`), or the wording of errors (`messages`).
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from telescope.config.base import accepts
from telescope.config.messages import describe_errors, show, unknown_field
from telescope.config.other_names import hint
from telescope.config.remarks import remarks
from telescope.config.schema import TelescopeConfig
from telescope.config.yaml_file import parse_yaml_value, read_yaml_file
from telescope.errors import ConfigError
from telescope.utils.text import did_you_mean

ENVIRONMENT_VARIABLES = {
    "TELESCOPE_RUN_DIR": "run_dir",
    "TELESCOPE_CHECKPOINT_DIR": "checkpoint_dir",
    "WANDB_PROJECT": "wandb_project",
    "WANDB_RUN_NAME": "wandb_run_name",
    "WANDB_TAGS": "wandb_tags",
}
"""Variables that fill in a field which neither the YAML nor the command line sets."""


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and remarks about it.

    `notes` are sentences for the person who starts the run: adjusted defaults, and settings that may surprise.
    `sources` names the origin of each chosen field.
    """

    config: TelescopeConfig
    notes: list[str]
    sources: dict[str, str] = field(default_factory=dict)


def load_resumed_config(run_dir: Path, overrides: Sequence[str] = (), *, path: Path | None = None) -> LoadedConfig:
    """Loads the config to continue a run, or `path`, without environment variables. Raises `ConfigError`."""
    if path is None:
        path = run_dir / "config.yaml"
        if not path.is_file():
            raise ConfigError(f"--resume {run_dir}: there is no run, because {_why_no_run(run_dir)}")
    given = parse_overrides(overrides)
    if "run_dir" in given:
        raise ConfigError(f"--resume {run_dir} and --run_dir {given['run_dir']} name two folders. Give one")
    flags = [*overrides, f"--run_dir={run_dir}"]
    if given.get("resume_from_checkpoint", False) is False:
        if "resume_from_checkpoint" in given:
            raise ConfigError("--resume continues from a checkpoint, and resume_from_checkpoint is false. Omit one")
        flags.append("--resume_from_checkpoint=true")
    return load_config(path, flags, {})


def load_config(
    path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Merges all layers and validates them. `overrides` are command-line flags, as in `["--learning_rate", "5e-7"]`.

    `environ` defaults to the process's own environment. Values in the file that are defaults count as not chosen, since
    files are often copies of all defaults. Raises `ConfigError` that names the field, the value, where it comes from,
    and the fix; every problem that can be seen at once is listed.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for variable, name in ENVIRONMENT_VARIABLES.items():
        text = (os.environ if environ is None else environ).get(variable, "").strip()
        if text:
            values[name] = [tag.strip() for tag in text.split(",") if tag.strip()] if name == "wandb_tags" else text
            sources[name] = f"environment variable {variable}"
    if path is not None:
        from_file, places = read_yaml_file(Path(path))
        values.update(from_file)
        sources.update(places)
        defaults = TelescopeConfig.model_construct().model_dump(mode="json", warnings=False)
        for name, value in from_file.items():
            if defaults.get(name, ...) == value and isinstance(value, bool) == isinstance(defaults[name], bool):
                del values[name], sources[name]
    from_flags = parse_overrides(overrides)
    if path is not None and not from_file and "environments" not in from_flags:
        raise ConfigError(
            f"--config {path} is empty: it sets no field. A run needs at least environments, for example "
            "`environments: [{name: countdown}]`"
        )
    values.update(from_flags)
    sources.update(dict.fromkeys(from_flags, "command line"))

    config = build_config(values, sources)
    return LoadedConfig(config, [*config.notes, *remarks(config)], sources)


def build_config(values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> TelescopeConfig:
    """Builds a `TelescopeConfig` from plain values. Raises `ConfigError` with readable messages."""
    sources = sources or {}
    known = TelescopeConfig.model_fields
    unknown = [
        unknown_field(str(name), known, sources.get(name), value)
        for name, value in values.items()
        if name not in known or (name == "algorithm" and isinstance(value, Mapping))  # a section of verl's files
    ]
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        return TelescopeConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(describe_errors(error, values, sources)) from None


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parses flags: `--field value`, `--field-name value`, `--field=value`, and `--flag` alone for a boolean.

    Values are read as YAML (scalars, lists, mappings), except that a field which takes only text gets the text as it
    was typed. Raises `ConfigError` for an unknown field, one given twice, a missing value, or text that is not YAML.
    """
    values: dict[str, Any] = {}
    typed_before: dict[str, str] = {}
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if not argument.startswith("--") or argument == "--":
            file = f", a file of fields as --config {argument}" if argument.endswith((".yaml", ".yml")) else ""
            about = (
                hint(argument.partition("=")[0].lstrip("+"), TelescopeConfig.model_fields) if "=" in argument else ""
            )
            raise ConfigError(f"Unexpected argument {argument!r}.{about} Fields are set as --field value{file}")
        typed, equals, text = argument[2:].partition("=")
        name = typed.replace("-", "_")
        if name not in TelescopeConfig.model_fields:
            flags = {"config", "dry-run"} - {name.replace("_", "-")}  # of telescope train; other commands lack them
            known = (*TelescopeConfig.model_fields, *flags)
            raise ConfigError(unknown_field(typed, known, "command line"))
        if not equals:
            if position < len(arguments) and not arguments[position].startswith("--"):
                text = arguments[position]
                position += 1
            elif accepts(TelescopeConfig, name, bool):
                text = "true"
            else:
                default = TelescopeConfig.model_fields[name].get_default(call_default_factory=True)
                example = "VALUE" if default in (None, []) else show(default)
                raise ConfigError(f"--{typed} needs a value, as in --{typed} {example}")
        if name in typed_before:
            raise ConfigError(f"--{typed} is given twice: {typed_before[name]!r} and {text!r}. Give it once")
        typed_before[name] = text
        values[name] = _parse_flag(name, text)
    return values


def _parse_flag(name: str, text: str) -> Any:
    kinds = [kind for kind in (str, bool, int, float, list, dict) if accepts(TelescopeConfig, name, kind)]
    if kinds != [str]:
        return parse_yaml_value(text, what=f"--{name}")
    return None if text.strip().lower() in ("null", "~") and accepts(TelescopeConfig, name, type(None)) else text


RUNS_ROOT = Path("runs")
MAX_NAME_LENGTH = 60  # characters of `wandb_run_name` in the name of a run directory; file systems allow 255 bytes


def choose_run_dir(config: TelescopeConfig, now: datetime | None = None) -> Path:
    """`run_dir` (which TELESCOPE_RUN_DIR fills in), else `runs/<wandb_run_name>-<UTC time>`. Absolute; not created."""
    if config.run_dir is not None:
        return Path(config.run_dir).expanduser().absolute()
    name = re.sub(r"[^\w.-]+", "-", config.wandb_run_name)[:MAX_NAME_LENGTH].strip("-.") or "run"
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    return (RUNS_ROOT / f"{name}-{stamp}").absolute()


def choose_checkpoint_dir(checkpoint_dir: str | None, run_dir: Path) -> Path:
    """Returns `checkpoint_dir` (or TELESCOPE_CHECKPOINT_DIR), else `checkpoints` in the run directory."""
    return Path(checkpoint_dir).expanduser().absolute() if checkpoint_dir else run_dir / "checkpoints"


def _why_no_run(folder: Path) -> str:
    """Returns why a folder cannot be resumed, and a likely alternative."""
    run = folder.absolute().parent.parent
    if folder.name.startswith("step_") and (run / "config.yaml").is_file():
        step = folder.name.removeprefix("step_")
        return f"it is a checkpoint. Give --resume {run} --resume_from_checkpoint {step}"
    if folder.is_dir():
        return "it holds no config.yaml"
    beside = sorted(path.parent.name for path in folder.absolute().parent.glob("*/config.yaml"))
    others = f" Runs in {folder.parent}: {', '.join(beside[:10])}." if beside else ""
    return f"the folder does not exist.{did_you_mean(folder.name, beside)}{others}"
