"""Chooses the W&B projects that are shown: named on the command line, found with the user's key, or added on the page.

Owns the list of projects. The page stores the user's choice in the document `projects`, with `added` and `removed` as
lists of ENTITY/PROJECT. Does not own the runs of a project (`remote`).
"""

import re
import threading
import time
from typing import Any

from telescope.dashboard.documents import Documents
from telescope.dashboard.remote import WandbRuns, cache_folder
from telescope.dashboard.wandb_runs import WandbError, WandbProject, WandbServer
from telescope.errors import UserError

DOCUMENT = "projects"

PATH = re.compile(r"[\w.-]+/[\w.-]+")

LOOK_SECONDS = 1.0
"""Time between two checks of the user's choice."""

FIND_SECONDS = 600.0
"""Time between two searches for projects. Each search asks the server about every project of the user."""

RETRY_SECONDS = 30.0
"""Time until the next search after a failure, such as a missing key."""


class Projects:
    """Updates `remotes`, which the registry shares, with found and chosen projects. Must be closed."""

    def __init__(self, remotes: list[WandbRuns], kept: Documents) -> None:
        self.remotes = remotes
        self._kept = kept
        self._named = {remote.project.path for remote in remotes}
        self._found: list[str] = []
        self._problem: str | None = "Searching W&B for your projects."
        self._server = WandbServer(cache_folder() / ".wandb")
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts to search for projects and to follow the user's choice, until `close`."""
        self._thread = threading.Thread(target=self._follow, name="telescope-wandb-projects", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the threads of the search and of all projects at their next step."""
        self._closing.set()
        for remote in list(self.remotes):
            remote.close()

    def rows(self) -> dict[str, Any]:
        """Returns the projects for the page. After `start`, the page can change them."""
        _, removed, problem = self._chosen()
        shown = [(remote.project.path, remote.num_runs, remote.problem) for remote in list(self.remotes)]
        return {
            "can_change": self._thread is not None,
            "projects": [dict(zip(("path", "runs", "problem"), row, strict=True)) for row in sorted(shown)],
            "removed": removed,
            "problem": problem or self._problem,
        }

    def _chosen(self) -> tuple[list[str], list[str], str | None]:
        """Returns the projects that the user added and removed, and why they cannot be read, if so."""
        value, problem = None, None
        try:
            value = self._kept.read(DOCUMENT).value
        except UserError as error:
            problem = str(error)
        kept = value if isinstance(value, dict) else {}
        added, removed = (
            [path for path in kept.get(name) or () if isinstance(path, str)] for name in ("added", "removed")
        )
        return [path for path in added if PATH.fullmatch(path)], removed, problem

    def _follow(self) -> None:
        due = 0.0
        while not self._closing.is_set():
            if time.monotonic() >= due:
                try:
                    self._found, self._problem = self._server.projects(), None
                except WandbError as error:
                    self._problem = str(error)
                due = time.monotonic() + (RETRY_SECONDS if self._problem else FIND_SECONDS)
            added, removed, _ = self._chosen()
            wanted = dict.fromkeys(path for path in (*self._found, *added) if path not in removed)
            for remote in list(self.remotes):
                if remote.project.path not in self._named | wanted.keys():
                    self.remotes.remove(remote)
                    remote.close()
            for path in wanted.keys() - {remote.project.path for remote in self.remotes}:
                entity, _, project = path.partition("/")
                remote = WandbRuns(WandbProject(entity, project, cache_folder() / ".wandb"))
                self.remotes.append(remote)
                remote.start(must_answer=False)
            self._closing.wait(LOOK_SECONDS)
