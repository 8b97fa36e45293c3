"""Reads tasks for a terminal: folders in harbor's format, or the tables of `own_tasks.toml`.

A folder has `instruction.md`, `task.toml`, `environment/` (the initial content of a sandbox), `tests/test.sh` and, for
people, `solution/solve.sh`. In `environment/Dockerfile`, FROM, WORKDIR, ENV, COPY, ADD and RUN count, in one stage.
Without a Dockerfile the files go to `/app`, where `setup.sh` runs if there is one.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from telescope.errors import UserError
from telescope.utils.text import user_path

Files = dict[str, bytes]
"""Contents by absolute path in the sandbox."""

APP = "/app"
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
        if not (folder / needed).is_file():
            raise UserError(f"terminal_tasks: the task {folder.name!r} has no {needed}.")
    try:
        table = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        seconds = float(table.get("verifier", {}).get("timeout_sec", 60.0))
        task = Task(folder.name, (folder / "instruction.md").read_text(encoding="utf-8"), verifier_seconds=seconds)
    except (ValueError, AttributeError) as error:
        raise UserError(f"terminal_tasks: the task {folder.name!r} has a broken task.toml: {error}") from error
    task.difficulty = str(table.get("metadata", {}).get("difficulty", ""))
    task.tests, task.solution = _files(folder / "tests", "/tests"), _files(folder / "solution", "/solution")
    environment = folder / "environment"
    if (environment / "Dockerfile").is_file():
        _read_dockerfile(task, environment)
    else:
        task.set_up += _upload(environment, APP)
        if (environment / "setup.sh").is_file():
            task.set_up.append("bash setup.sh && rm setup.sh")
    task.image = table.get("environment", {}).get("docker_image") or task.image
    return task


def _read_dockerfile(task: Task, folder: Path) -> None:
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", (folder / "Dockerfile").read_text("utf-8"), flags=re.M))
    task.working_dir = "/"
    for line in text.splitlines():
        keyword, _, rest = line.strip().partition(" ")
        words = shlex.split(rest) if keyword.upper() in ("FROM", "WORKDIR", "COPY", "ADD", "ENV") else []
        words = [word for word in words if not word.startswith("--")]
        match keyword.upper():
            case "FROM":
                task.image = words[0]
            case "WORKDIR":
                task.working_dir = str(PurePosixPath(task.working_dir) / words[0])
            case "ENV":
                pairs = words if "=" in words[0] else [f"{words[0]}={' '.join(words[1:])}"]
                task.exports += "".join(f"export {shlex.quote(pair)}; " for pair in pairs)
            case "COPY" | "ADD":
                *sources, target = words
                place = str(PurePosixPath(task.working_dir) / target) + "/" * target.endswith(("/", "."))
                for source in sources:
                    many = len(sources) > 1 or (folder / source).is_dir() or place.endswith("/")
                    name = "" if not many or (folder / source).is_dir() else f"/{Path(source).name}"
                    task.set_up += _upload(folder / source, place.rstrip("/") + name)
            case "RUN":
                place = shlex.quote(task.working_dir)
                task.set_up.append(f"mkdir -p {place} && cd {place} || exit 1; {rest}")


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
