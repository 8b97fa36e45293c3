"""Keeps the code that a run started with in one compressed file per start, `code/attempt-<n>.tar.gz`.

    git.json             commit, branch, remote, whether there were changes, and the files that were left out
    changes.diff         uncommitted changes of tracked files
    sources/<path>       files of the checkout in which the run was started, tracked or not ignored; no runs
    environments/<n>/    files of the folders in `environments_path` outside of that checkout
    telescope/           the installed package, if it is outside of that checkout

Invariants: a file that cannot be read, or a missing git, only adds an entry to `left_out`. Files that look like secrets
are never copied.
"""

import io
import json
import logging
import re
import subprocess
import tarfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import telescope
from telescope.record.files import RunFiles, replacing
from telescope.utils.digests import files_below

logger = logging.getLogger(__name__)

GIT_SECONDS = 5.0
"""Deadline of a git command, so that a slow network drive does not delay the start."""

DIFF = (
    *("-c", "core.quotePath=false", "diff", "HEAD", "--no-color", "--no-ext-diff"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
"""Git's own format with names in UTF-8, whatever the user's configuration of Git is."""

DIFF_SECONDS = 60.0
"""Deadline of a git command of the snapshot. Nothing waits for it."""

MAX_TOTAL_BYTES = 64 * 2**20
"""Bytes of all files of a snapshot, before compression. Other files are left out."""

SECRETS = (".env", ".env.*", "*.pem", "*.key", ".netrc", "id_rsa*", "id_ed25519*", "credentials*", "*.p12")
"""Names of files that are never copied."""

BUILT_PAGES = "dashboard/static/"
"""Folder of the package that is built from sources: fonts and minified scripts, which no one reads."""


def git_state(directory: Path) -> tuple[str | None, bool | None]:
    """Returns the commit of the checkout and whether it has uncommitted changes. Either is None if it is unknown."""
    if (commit := _line(directory, "rev-parse", "HEAD")) is None:
        return None, None
    try:
        return commit, bool(_git(directory, "status", "--porcelain").strip())
    except (OSError, subprocess.SubprocessError):  # a large folder on a slow drive
        return commit, None


@dataclass
class CodeSnapshot:
    """Writes a snapshot and lists what it leaves out. `max_bytes` is the limit for one file."""

    max_bytes: int
    exclude: Sequence[str]
    left_out: list[str] = field(default_factory=list)
    _room: int = MAX_TOTAL_BYTES

    def write(self, path: Path, start: Path, folders: Sequence[Path]) -> None:
        """Writes the snapshot of the checkout around `start` and of `folders`. Raises `OSError`."""
        path.parent.mkdir(exist_ok=True)  # without parents, so that a removed run directory is not created again
        root = Path(found) if (found := _line(start, "rev-parse", "--show-toplevel", warns=True)) else None
        with replacing(path) as temporary, tarfile.open(temporary, "w:gz", compresslevel=6) as archive:
            if root is not None:
                # Tracked files, and files that are neither tracked nor ignored.
                listing = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
                listed = set(_git(root, *listing, seconds=DIFF_SECONDS).split("\0")) - {""}
                runs = tuple(name.removesuffix("run.json") for name in listed if name.endswith("/run.json"))
                self._add_all(archive, "sources", root, sorted(name for name in listed if not name.startswith(runs)))
                _add(archive, "changes.diff", self._diff(root).encode("utf-8", "replace"))
            package = Path(telescope.__file__).parent
            if root is None or not package.is_relative_to(root):
                names = (name for name in files_below(package) if not name.startswith(BUILT_PAGES))
                self._add_all(archive, "telescope", package, names)
            for number, folder in enumerate(folders):
                if root is None or not folder.is_relative_to(root):
                    self._add_all(archive, f"environments/{number}", folder, files_below(folder))
            _add(archive, "git.json", json.dumps(self._description(root), indent=1).encode())

    def _add_all(self, archive: tarfile.TarFile, prefix: str, root: Path, names: Iterable[str]) -> None:
        patterns = (*self.exclude, *SECRETS)
        for name in names:
            path = root / name
            parts = {name, *Path(name).parts}
            if any(fnmatch(part, pattern) for pattern in patterns for part in parts):
                continue
            try:
                if path.is_symlink() or not path.is_file():
                    continue
                size = path.stat().st_size
                if size > min(self.max_bytes, self._room):
                    self.left_out.append(f"{prefix}/{name} ({size} bytes)")
                    continue
                content = path.read_bytes()
            except OSError as error:
                self.left_out.append(f"{prefix}/{name} ({error.strerror})")
                continue
            self._room -= len(content)
            _add(archive, f"{prefix}/{name}", content)

    def _diff(self, root: Path) -> str:
        excluded = [f":(exclude,glob)**/{pattern}" for pattern in (*SECRETS, *self.exclude)]
        try:
            text = _git(root, *DIFF, "--", ".", *excluded, seconds=DIFF_SECONDS)
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
            self.left_out.append(f"changes.diff ({error})")
            return ""
        if len(text) > min(self._room, 10 * self.max_bytes):
            self.left_out.append(f"changes.diff ({len(text)} characters)")
            return ""
        return text

    def _description(self, root: Path | None) -> dict[str, object]:
        commit, dirty = git_state(root) if root is not None else (None, None)
        remote = _line(root, "config", "--get", "remote.origin.url")
        return {
            "root": str(root) if root is not None else None,
            "commit": commit,
            "dirty": dirty,
            "branch": _line(root, "rev-parse", "--abbrev-ref", "HEAD"),
            "remote": remote and re.sub(r"//[^/@]*@", "//", remote),  # without a password
            "left_out": self.left_out,
        }


def keep_code(run_dir: Path, attempt: int, *, max_mb: float, exclude: Sequence[str], folders: Sequence[str]) -> None:
    """Writes the snapshot of this start in a daemon thread, which logs a failure as one warning."""
    path, start = RunFiles(run_dir).code / f"attempt-{attempt}.tar.gz", Path.cwd()
    places = [Path(folder).expanduser().resolve() for folder in folders]

    def write() -> None:
        try:
            CodeSnapshot(int(max_mb * 1e6), exclude).write(path, start, places)
        except Exception as error:  # a run does not depend on its snapshot
            logger.warning("The code of this run is not kept in %s: %s", path, error)

    threading.Thread(target=write, name="telescope-code", daemon=True).start()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _line(directory: Path | None, *arguments: str, warns: bool = False) -> str | None:
    if directory is None:
        return None
    try:
        return _git(directory, *arguments).strip() or None
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode("utf-8", "replace")
        if warns and "dubious ownership" in said:  # a folder of the host in a container
            why, fix = "their folder belongs to another user", said.strip().splitlines()[-1].strip()
            logger.warning("The sources of this run are not kept, nor is their commit: %s. Fix: %s", why, fix)
        return None


def _git(directory: Path, *arguments: str, seconds: float = GIT_SECONDS) -> str:
    command = ["git", "-C", str(directory), *arguments]
    done = subprocess.run(command, capture_output=True, check=True, timeout=seconds)
    return done.stdout.decode("utf-8", "replace")
