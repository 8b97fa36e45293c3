"""Builds the pages of `telescope ui` from dashboard/ into the package, if Node.js is there.

The set-up runs it after `.venv` is ready, `make dashboard` on its own, and scripts/build_backend.py before it makes a
distribution. Without Node.js the pages of the newest release are downloaded; a failure does not end the set-up, because
training needs no pages.

A file inside the built pages holds the digest of their sources: a second run with the same sources ends at once.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import io
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "dashboard"
BUILT = ROOT / "src" / "telescope" / "dashboard" / "static"
RELEASE = "https://github.com/eduardoslonski/telescope/releases/latest/download/dashboard.zip"
OLDEST_NODE = (20, 19)
TIMEOUT_SECONDS = 600
DOWNLOAD_TIMEOUT_SECONDS = 20  # without an answer, as in a cluster without the internet


class BuildError(Exception):
    """The pages cannot be built; the message is the full explanation with the fix."""


def build() -> str | None:
    """Builds the pages if their sources changed. Returns what it did in one line, None if nothing was left to do.

    Without Node.js it keeps the pages that are there, or downloads those of the newest release. Raises `BuildError` if
    that or npm fails.
    """
    has_pages = (BUILT / "index.html").is_file()
    if has_pages and not SOURCES.is_dir():  # a source distribution
        return None
    wanted = digest_of_sources(SOURCES)
    stamp = BUILT / "sources.txt"
    if stamp.is_file() and stamp.read_text() == wanted:
        return None
    try:
        npm = find_npm()
    except BuildError as error:
        return f"{error}. The pages that are there stay" if has_pages else download(str(error))
    started = time.monotonic()
    lock = SOURCES / "package-lock.json"
    installed = SOURCES / "node_modules" / ".telescope-lock"
    packages = hashlib.sha256(lock.read_bytes()).hexdigest()
    if not installed.is_file() or installed.read_text() != packages:
        run_npm([npm, "ci", "--no-fund", "--no-audit"])
        installed.write_text(packages)
    run_npm([npm, "run", "build"])
    stamp.write_text(wanted)
    return f"built the dashboard in {time.monotonic() - started:.0f} s"


def digest_of_sources(folder: Path) -> str:
    """Returns a hash of the names and contents of all files that the pages are made of."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if relative.parts[0] != "node_modules" and path.is_file():
            total.update(f"{relative.as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return total.hexdigest()


def find_npm() -> str:
    """Returns the path of npm; raises `BuildError` if it or a recent Node.js is missing."""
    needed = ".".join(map(str, OLDEST_NODE))
    fix = f"the pages of `telescope ui` are not built. Install Node.js {needed} or newer, then run `make dashboard`"
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise BuildError(f"no Node.js found: {fix}")
    answer = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    version = tuple(map(int, re.findall(r"\d+", answer)[:2]))
    if version < OLDEST_NODE:
        raise BuildError(f"Node.js {answer.strip() or 'of an unknown version'} is too old: {fix}")
    return npm


def download(reason: str) -> str:
    """Puts the pages of the newest release in place and says so; raises `BuildError` with `reason` if it cannot."""
    try:
        with urllib.request.urlopen(RELEASE, timeout=DOWNLOAD_TIMEOUT_SECONDS) as response:
            zipfile.ZipFile(io.BytesIO(response.read())).extractall(BUILT)
    except (OSError, http.client.HTTPException, zipfile.BadZipFile) as error:
        raise BuildError(f"{reason}. Those of the newest release cannot be downloaded: {error}") from error
    return "downloaded the pages of the newest release, because there is no Node.js to build them"


def run_npm(command: list[str]) -> None:
    """Runs npm in dashboard/ without output; raises `BuildError` with the last lines when it fails."""
    try:
        finished = subprocess.run(
            command, cwd=SOURCES, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"`{' '.join(command[1:])}` in dashboard/ took more than {TIMEOUT_SECONDS} s") from None
    if finished.returncode != 0:
        lines = (finished.stdout + finished.stderr).strip().splitlines()[-12:]
        raise BuildError(
            f"`npm {' '.join(command[1:])}` in dashboard/ failed; the pages of `telescope ui` are not built. "
            "Fix it, then run `make dashboard`\n  " + "\n  ".join(lines)
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the pages of `telescope ui` if their sources changed.")
    parser.add_argument("--quiet", action="store_true", help="print nothing when nothing is left to do")
    arguments = parser.parse_args()
    try:
        done = build()
    except BuildError as error:
        print(f"dashboard: {error}", file=sys.stderr)
        return 1
    if done or not arguments.quiet:
        print(f"dashboard: {done or 'up to date'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
