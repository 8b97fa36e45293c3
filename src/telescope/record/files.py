"""Defines the layout of a run directory, replaces small files atomically, and locks the directory for one writer.

Owns the paths (`config.yaml`, `run.json`, `heartbeat.json`, `summary.json`, `logs/`, `checkpoints/`, `tables/`). Does
not own the contents.

Invariant: a file that another process may read is written under a hidden name in the same directory and then renamed.
A reader therefore sees the old content or the new content.

The lock also checks that the directory has not been replaced since it was locked. If it has, the `recorder` decides
what happens to the rows. A process id alone does not identify a process: ids are reused, and a run directory may be
read on another machine, in another container or after a reboot.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic_core

from telescope.errors import UserError

logger = logging.getLogger(__name__)

STANDALONE = "standalone-"
"""Prefix of the ids of evals and samples that `telescope eval` adds to the record of a run."""
TEMPORARY_PREFIX = ".writing-"
"""Name prefix of incomplete files. Readers ignore them, and the next writer removes them."""


class RunFiles:
    """Paths in a run directory. Creates nothing."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = root = Path(run_dir)
        self.config = root / "config.yaml"
        """The resolved config of the newest attempt."""
        self.run_json = root / "run.json"
        """Identity and status of the run."""
        self.heartbeat = root / "heartbeat.json"
        """Heartbeat of the recording process."""
        self.summary = root / "summary.json"
        """Result of a run that has ended."""
        self.logs = root / "logs"
        """Log files, one per component."""
        self.checkpoints = root / "checkpoints"
        """One folder per checkpoint, see `orchestrator.checkpoints`."""
        self.adapters = root / "adapters"
        """The adapters of the newest weight sync (`lora_sync: adapter`)."""
        self.code = root / "code"
        """The code of each start, see `code_snapshot`."""
        self.model = root / "model"
        """The trained model, in Hugging Face format."""
        self.wandb = root / "wandb"
        """Folder of W&B's files."""
        self.tables = root / "tables"
        """One folder per table, see `table_files`."""
        self.in_flight = self.tables / "in_flight.json"
        """The samples that are being generated now."""
        self.now = self.tables / "now.json"
        """The current activity of the run, see `orchestrator.status`."""
        self.writer_lock = self.tables / ".writer.lock"
        """Lock file of the process that writes the tables."""

    def table(self, name: str) -> Path:
        """Returns the folder of a table's files."""
        return self.tables / name

    def log(self, component: str) -> Path:
        """Returns the log file of a component."""
        return self.logs / f"{component}.log"


@dataclass(frozen=True, slots=True)
class FileState:
    """Size and modification time of a file, which differ if the file has changed."""

    size: int
    modified_ns: int


def record_files(run_dir: str | os.PathLike[str]) -> dict[str, FileState]:
    """Returns the files that a copy of the run needs, by their paths.

    Leaves out checkpoints, weights, folders of trackers, and incomplete files.
    """
    files = RunFiles(run_dir)
    found = {}
    pending = [files.config, files.run_json, files.heartbeat, files.summary, files.code, files.logs, files.tables]
    while pending:
        path = pending.pop()
        try:
            if path.is_dir():
                pending += [each for each in path.iterdir() if not each.name.startswith(".")]
                continue
            state = path.stat()
        except FileNotFoundError:  # replaced by the recorder since the folder was listed
            continue
        found[path.relative_to(files.run_dir).as_posix()] = FileState(state.st_size, state.st_mtime_ns)
    return found


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path beside `path` for its new content, and replaces `path` when the block ends without an error."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Writes `content` to `path`. Readers see either the old or the new content. Raises `OSError`."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def replace_json(path: Path, value: Any) -> None:
    """Replaces `path` with `value` as JSON. Raises `OSError`."""
    replace_file(path, _json_bytes(value))


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to disk, so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def overwrite_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON over an existing file, in place, for a disk that has no space for another file.

    Raises `OSError` and keeps the old content if the new content does not fit the file's blocks. A reader may see
    partly written content, so this is only for the end of a run whose disk stays full.
    """
    content = _json_bytes(value)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, len(content))
        file.write(content)
        file.truncate()


def _json_bytes(value: Any) -> bytes:
    try:  # five times as fast as Python's json
        return pydantic_core.to_json(value, indent=1, inf_nan_mode="constants", fallback=plain_value) + b"\n"
    except ValueError:  # a text that is not valid UTF-8
        return json.dumps(value, indent=1, default=plain_value).encode() + b"\n"


def plain_value(value: Any) -> Any:
    """Converts numpy numbers and arrays to Python values, and anything else to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file, or None if there is no file. Raises `ValueError` for invalid JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None


def read_heartbeat(run_dir: Path | str) -> dict[str, Any] | None:
    """Returns the last heartbeat, with at least `time` (Unix seconds), or None."""
    try:
        value = read_json(RunFiles(run_dir).heartbeat)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("time"), float | int) else None


class WriterLock:
    """Locks one run directory for writing. The last `acquire` has set `is_removed`."""

    def __init__(self, files: RunFiles) -> None:
        self.is_removed = False
        self._files = files
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Returns whether this process may write the directory."""
        return self._descriptor is not None and not self.is_removed

    def acquire(self) -> None:
        """Locks the directory for this process, or checks that it still has the lock.

        Raises `UserError` if another process has the lock, and `OSError` if the directory cannot be created or was
        removed. A removed directory is not created again, because its earlier rows would be missing.
        """
        if self._descriptor is not None:
            try:
                found = os.stat(self._files.writer_lock)
            except FileNotFoundError:
                found = None
            self.is_removed = found is None or not os.path.samestat(found, os.fstat(self._descriptor))
            if self.is_removed:
                gone = "the run directory was removed or replaced"
                raise FileNotFoundError(errno.ENOENT, gone, str(self._files.run_dir))
            return
        self._files.tables.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._files.writer_lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(_other_writer(self._files.run_dir)) from None
        except OSError as error:
            # Some network file systems have no locks. The run continues without that protection.
            logger.warning(
                "record: %s cannot be locked (%s): do not start a second run in it", self._files.tables, error
            )
        self._descriptor = descriptor

    def release(self) -> None:
        """Unlocks the directory, so that another process can write. Does nothing without the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _other_writer(run_dir: Path) -> str:
    who = "Another process, such as `telescope compact`,"
    identity = ProcessIdentity.from_json((read_heartbeat(run_dir) or {}).get("process"))
    if identity is not None and identity.is_alive() is not False:
        who = f"Process {identity.pid} on {identity.host}"
    return (
        f"run_dir {str(run_dir)!r} is in use: {who} writes it. Wait until it ends, stop it, or choose another run_dir."
    )


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identifies a process uniquely. Fields are empty if the system does not report them."""

    host: str
    pid: int
    started: str
    """Start of the process in ticks since boot."""
    boot: str
    namespace: str
    """The process id namespace. Containers have their own."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Returns the identity of this process."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _start_ticks(pid) or "", *_kernel())

    @classmethod
    def from_json(cls, value: Any) -> ProcessIdentity | None:
        """Returns the identity with these fields, or None if `value` has other fields."""
        try:
            return cls(**{name: value[name] for name in cls.__slots__})
        except (TypeError, KeyError):
            return None

    def is_alive(self) -> bool | None:
        """Returns whether the process is running, or None if this machine cannot tell."""
        if not self.boot or not self.started or (self.boot, self.namespace) != _kernel():
            return None
        return _start_ticks(self.pid) == self.started


def _start_ticks(pid: int) -> str | None:
    """Returns when a local process started, or None if it has exited or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the name in parentheses, which can contain spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else fields[19]


def _kernel() -> tuple[str, str]:
    """Returns the id of this boot and the process id namespace. Both are empty if the system does not report them."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    return "", ""
