"""Reads tasks for a terminal: folders in harbor's format, or the tables of `own_tasks.toml`.

A folder has `instruction.md`, `task.toml`, `environment/` (the initial content of a sandbox), `tests/test.sh` and, for
people, `solution/solve.sh`. In `environment/Dockerfile`, FROM, WORKDIR, ENV, COPY, ADD and RUN count, in one stage.
Without a Dockerfile the files go to `/app`, where `setup.sh` runs if there is one. In `task.toml`, `timeout_sec` and
`env` of the tests count, `docker_image`, `env` and `workdir` of the environment, and the difficulty.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from telescope.errors import UserError
from telescope.utils.text import user_path

Files = dict[str, bytes]
"""Contents by absolute path in the sandbox."""

APP = "/app"
VERIFIER_SECONDS = 600.0
"""Time for the tests, if `task.toml` does not say. The same as in harbor."""
_IGNORED = (
    "", "CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL", "USER", "VOLUME",
)  # fmt: skip
"""Instructions of a Dockerfile that do not change the files in a sandbox."""
OWN_TASKS = Path(__file__).with_name("own_tasks.toml")


@dataclass(slots=True)
class Task:
    """A task. `set_up` has files to upload or commands to run, in order; `tests` and `solution` come later."""

    name: str
    instruction: str
    set_up: list[Files | str] = field(default_factory=list)
    tests: Files = field(default_factory=dict)
    solution: Files = field(default_factory=dict)
    image: str = ""
    working_dir: str = APP
    exports: str = ""
    """Shell commands that set variables, before every command."""
    verifier_exports: str = ""
    """The same before the tests."""
    verifier_seconds: float = 60.0
    difficulty: str = ""


def own_tasks() -> list[Task]:
    """Returns the tasks that ship with Telescope."""
    return [
        Task(
            name,
            task["instruction"].strip(),
            set_up=[task["setup"]],
            tests={"/tests/test.sh": task["test"].encode()},
            solution={"/solution/solve.sh": task["solution"].encode()},
            difficulty=task["difficulty"],
        )
        for name, task in tomllib.loads(OWN_TASKS.read_text(encoding="utf-8")).items()
    ]


def read_tasks(folder: str) -> list[Task]:
    """Returns the tasks in a folder by name. Raises `UserError` if there are none, or one is incomplete."""
    root = user_path(folder)
    found = sorted(path.parent for path in root.glob("*/task.toml")) or [root] * (root / "task.toml").is_file()
    if not found:
        raise UserError(f"terminal_tasks: tasks is {folder!r}, which has no folder with a task.toml.")
    return [_read_task(path) for path in found]


def _read_task(folder: Path) -> Task:
    for needed in ("instruction.md", "tests/test.sh"):
        if not (folder / needed).is_file() or not (folder / needed).stat().st_size:
            raise UserError(f"terminal_tasks: the task {folder.name!r} has no {needed}, or an empty one.")
    for path in (path for name in ("environment", "tests", "solution") for path in (folder / name).rglob("*")):
        if not _stays_inside(path, folder):
            raise UserError(
                f"terminal_tasks: {path.relative_to(folder)} of the task {folder.name!r} is a link to "
                f"{path.resolve()}, outside the folder of the task. Put the file itself there."
            )
    environment = folder / "environment"
    if compose := sorted(environment.glob("*compose.y*ml")):
        raise UserError(
            f"terminal_tasks: the task {folder.name!r} needs the containers of {compose[0].name}, but a sandbox is "
            "one. Leave the task out."
        )
    try:
        table = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        settings, verifier = table.get("environment", {}), table.get("verifier", {})
        exports = _exports(settings)
        task = Task(
            folder.name,
            (folder / "instruction.md").read_text(encoding="utf-8"),
            verifier_seconds=float(verifier.get("timeout_sec", VERIFIER_SECONDS)),
            verifier_exports=_exports(verifier),
            difficulty=str(table.get("metadata", {}).get("difficulty", "")),
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"terminal_tasks: the task {folder.name!r} has a broken task.toml: {error}") from error
    task.tests, task.solution = _files(folder / "tests", "/tests"), _files(folder / "solution", "/solution")
    if (environment / "Dockerfile").is_file():
        task.working_dir = "/"
        text = re.sub(r"^\s*#.*\n", "", (environment / "Dockerfile").read_text("utf-8"), flags=re.M)
        for line in map(str.strip, re.sub(r"\\[ \t]*\n(?:[ \t]*\n)*", " ", text).splitlines()):
            try:
                _carry_out(task, environment, line)
            except (ValueError, IndexError) as error:
                raise UserError(
                    f"terminal_tasks: {line[:80]!r} in the Dockerfile of the task {folder.name!r} cannot be carried "
                    f"out: {error}. Write it with FROM, WORKDIR, ENV, COPY, ADD and RUN, in one stage."
                ) from error
    else:
        task.set_up += _upload(environment, settings.get("workdir") or APP)
        if (environment / "setup.sh").is_file():
            task.set_up.append("bash setup.sh && rm setup.sh")
    task.image = settings.get("docker_image") or task.image
    task.working_dir = settings.get("workdir") or task.working_dir
    task.exports += exports
    return task


def _exports(table: Mapping[str, Any]) -> str:
    """Returns commands that set the variables of `env`. `${NAME}` and `${NAME:-default}` are this process's."""
    exports = ""
    for name, value in table.get("env", {}).items():
        if template := re.fullmatch(r"\$\{([^}:]+)(?::-(.*))?\}", str(value)):
            value = os.environ.get(template[1], template[2])
            if value is None:
                raise ValueError(f"env has ${{{template[1]}}}, but this variable is not set")
        exports += f"export {name}={shlex.quote(str(value))}; "
    return exports


def _stays_inside(path: Path, folder: Path) -> bool:
    """Returns whether a path leads into the folder, or into its repository if the folder is in the hub's cache."""
    folder = folder.resolve()  # files in the cache are links from `snapshots` to `blobs` beside it
    cached = (place for place in folder.parents if re.match("(datasets|models|spaces)--", place.name))
    return path.resolve().is_relative_to(next(cached, folder))


def _carry_out(task: Task, folder: Path, line: str) -> None:
    """Adds an instruction of a Dockerfile to a task. Raises `ValueError` for what needs a build."""
    keyword, rest = [*line.split(maxsplit=1), "", ""][:2]
    if re.match(r"(--\S+ )*<<", rest) or "--from=" in rest:
        raise ValueError("here-documents and several stages need a build")
    keyword, rest = keyword.upper(), re.sub(r"^(--\S+\s+)+", "", rest)
    if "$" in rest and keyword in ("FROM", "WORKDIR", "COPY", "ADD"):
        raise ValueError("a variable in it needs a build, so write its value")
    words: list[str] = []
    if keyword in ("FROM", "WORKDIR", "COPY", "ADD", "ENV", "ARG"):
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    match keyword:
        case "FROM":
            earlier, task.image = task.image, words[0]
            if earlier:
                raise ValueError("several stages need a build")
        case "WORKDIR":
            task.working_dir = str(PurePosixPath(task.working_dir) / words[0])
        case "ENV" | "ARG":
            pairs = words if "=" in words[0] or keyword == "ARG" else [f"{words[0]}={' '.join(words[1:])}"]
            for name, _, value in (pair.partition("=") for pair in pairs if "=" in pair):
                value = re.sub(r'[\\"`]|\$\(', r"\\\g<0>", value)  # variables such as $PATH are replaced
                task.exports += f'export {name}="{value}"; '
        case "COPY" | "ADD":
            *sources, target = words
            if keyword == "ADD" and any(re.search(r"^(?!.*://).*\.(tar(\.\w+)?|t[gbx]z2?)$", s) for s in sources):
                raise ValueError("ADD unpacks an archive, so write COPY, and RUN tar")
            place = str(PurePosixPath(task.working_dir) / target) + "/" * target.endswith(("/", "."))
            found = [sorted(glob.glob(source.lstrip("/") or ".", root_dir=folder)) for source in sources]
            if not all(found):
                raise ValueError(f"environment/ has no {sources[found.index([])]}")
            for source in [folder / name for names in found for name in names]:
                if not _stays_inside(source, folder):
                    raise ValueError(f"{source.relative_to(folder)} is outside environment/, so put it there")
                many = len(sources) > 1 or len(found[0]) > 1 or source.is_dir() or place.endswith("/")
                name = "" if not many or source.is_dir() else f"/{source.name}"
                task.set_up += _upload(source, place.rstrip("/") + name)
        case "RUN":
            place = shlex.quote(task.working_dir)
            command = shlex.join(json.loads(rest)) if rest.startswith("[") else rest
            task.set_up.append(f"mkdir -p {place} && cd {place} || exit 1; {command}")
        case _ if keyword not in _IGNORED:
            raise ValueError("it is no instruction, or is of a here-document, which needs a build")


def _paths(source: Path, target: str) -> dict[str, Path]:
    """Returns a file, or the files below a folder, by their paths below `target`."""
    if source.is_file():
        return {target: source}
    found = [path for path in sorted(source.rglob("*")) if path.is_file() and path.name != "Dockerfile"]
    return {f"{target}/{path.relative_to(source).as_posix()}": path for path in found}


def _files(source: Path, target: str) -> Files:
    return {place: path.read_bytes() for place, path in _paths(source, target).items()}


def _upload(source: Path, target: str) -> list[Files | str]:
    """Returns the steps that upload a file or folder, with the set of executable files."""
    programs = [shlex.quote(place) for place, path in _paths(source, target).items() if os.access(path, os.X_OK)]
    return [_files(source, target), *[f"chmod +x {' '.join(programs)}"] * bool(programs)]
