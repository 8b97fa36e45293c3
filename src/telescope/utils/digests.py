"""Digests of files (SHA-256, as `sha256sum` prints them), which reveal damaged and exchanged files."""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ANNOUNCED_BYTES = 4 * 10**9
"""Less is read within seconds."""


def digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the digest of each file in `folder`, read in parallel. Raises `OSError`."""
    chosen = sorted(names)
    with ThreadPoolExecutor() as pool:  # hashlib releases the interpreter lock
        return dict(zip(chosen, pool.map(lambda name: _digest(folder / name), chosen), strict=True))


def files_below(folder: Path) -> list[str]:
    """Returns the paths of all files in a folder and its subfolders, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def damage(folder: Path, digests: Mapping[str, str]) -> list[str]:
    """Compares files with their digests from when they were written. Returns what is missing, changed or unreadable.

    Prints a notice on the terminal if it takes more than a few seconds.
    """
    found = [f"{name} does not exist" for name in sorted(digests) if not (folder / name).is_file()]
    num_bytes = sum((folder / name).stat().st_size for name in digests if (folder / name).is_file())
    if num_bytes >= ANNOUNCED_BYTES:
        words = f"comparing {num_bytes / 1e9:.3g} GB with the digests of when they were written"
        print(f"{folder}: {words}", file=sys.stderr, flush=True)
    try:
        now = digests_of(folder, (name for name in digests if (folder / name).is_file()))
    except OSError as error:
        return [*found, f"a file cannot be read ({error})"]
    return found + [f"{name} has changed since it was written" for name in now if now[name] != digests[name]]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
