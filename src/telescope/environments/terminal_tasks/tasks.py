"""Reads tasks for a terminal: folders in harbor's format, or the tables of `own_tasks.toml`.

A folder has `instruction.md`, `task.toml`, `environment/` (what a sandbox starts with), `tests/test.sh` and, for
people, `solution/solve.sh`. Of `environment/Dockerfile`, FROM, WORKDIR, ENV, COPY, ADD and RUN count, in one stage.
Without a Dockerfile the files go to `/app`, where `setup.sh` runs if there is one.
"""

from __future__ import annotations

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
    """A task. `set_up` are files to upload or commands to run, in this order; `tests` and `solution` come later."""

    name: str
    instruction: str
    set_up: list[Files | str] = field(default_factory=list)
    tests: Files = field(default_factory=dict)
    solution: Files = field(default_factory=dict)
    image: str = ""
    working_dir: str = APP
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
    """Returns the tasks in a folder, by name. Raises `UserError` if there is none, or one is incomplete."""
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
        task.set_up.append(_files(environment, APP))
        if (environment / "setup.sh").is_file():
            task.set_up.append("bash setup.sh && rm setup.sh")
    task.image = table.get("environment", {}).get("docker_image") or task.image
    return task


def _read_dockerfile(task: Task, folder: Path) -> None:
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", (folder / "Dockerfile").read_text("utf-8"), flags=re.M))
    task.working_dir, exports = "/", ""
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
                exports += "".join(f"export {shlex.quote(pair)}; " for pair in pairs)
            case "COPY" | "ADD":
                *sources, target = words
                place = str(PurePosixPath(task.working_dir) / target) + "/" * target.endswith(("/", "."))
                files: Files = {}
                for source in sources:
                    many = len(sources) > 1 or (folder / source).is_dir() or place.endswith("/")
                    name = "" if not many or (folder / source).is_dir() else f"/{Path(source).name}"
                    files |= _files(folder / source, place.rstrip("/") + name)
                task.set_up.append(files)
            case "RUN":
                task.set_up.append(exports + rest)


def _files(source: Path, target: str) -> Files:
    """Returns a file, or the files below a folder, by their paths below `target`."""
    if source.is_file():
        return {target: source.read_bytes()}
    return {
        f"{target}/{path.relative_to(source).as_posix()}": path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.is_file() and path.name != "Dockerfile"
    }
