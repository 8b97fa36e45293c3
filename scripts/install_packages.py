"""Installs packages of the system that some tests need: Chromium for the pages, bubblewrap for local sandboxes.

The set-up runs it after `.venv` is ready. A variable per package decides: 0 or nothing (`make setup`) installs nothing,
1 installs or fails, and auto (`make test`) installs as root on a machine with apt-get, and elsewhere leaves those tests
out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browser import MISSING, find_chromium

TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Need:
    """Something that some tests need. `missing` says how to get it otherwise."""

    name: str
    find: Callable[[], object]
    packages: tuple[str, ...]
    missing: str


NEEDS = {
    # Without a font, pages would show boxes.
    "CHROMIUM": Need("Chromium", find_chromium, ("chromium", "fonts-dejavu-core"), MISSING),
    "BUBBLEWRAP": Need(
        "bubblewrap", lambda: shutil.which("bwrap"), ("bubblewrap",), "Install the package bubblewrap of your system."
    ),
}
"""By the variable that decides."""


class InstallError(Exception):
    """A package cannot be installed; the message is the full explanation with the fix."""


def install(variable: str) -> str | None:
    """Installs what the variable names if it is missing and wanted. Returns what it did in one line, or None.

    Raises `InstallError` if it is wanted and cannot be installed.
    """
    need = NEEDS[variable]
    wanted = os.environ.get(variable) or "0"
    if wanted not in ("0", "1", "auto"):
        raise InstallError(f"{variable}={wanted} must be 0, 1 or auto")
    if wanted == "0" or need.find() is not None:
        return None
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        if wanted == "auto":
            return None
        raise InstallError(f"{variable}=1 needs root and apt-get. {need.missing}")
    started = time.monotonic()
    without = f"{variable}=0 goes on without it."
    run([apt, "update"], without)
    run([apt, "install", "--yes", "--no-install-recommends", *need.packages], without)
    if need.find() is None:
        raise InstallError(f"apt-get installed a {need.name} that is no command of this machine. {need.missing}")
    return f"installed {need.name} in {time.monotonic() - started:.0f} s"


def run(command: list[str], without: str) -> None:
    """Runs a command without output; raises `InstallError` with the last lines, and `without`, when it fails."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"`{' '.join(command)}` took more than {TIMEOUT_SECONDS} s. {without}") from None
    if finished.returncode != 0:
        lines = (finished.stdout + finished.stderr).strip().splitlines()[-12:]
        raise InstallError(f"`{' '.join(command)}` failed. {without}\n  " + "\n  ".join(lines))


def main() -> int:
    try:
        for variable in NEEDS:
            if done := install(variable):
                print(f"set-up: {done}", flush=True)
    except InstallError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
