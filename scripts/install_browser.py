"""Installs Chromium for the tests of the pages.

The set-up runs it after `.venv` is ready. `CHROMIUM` decides: 0 or nothing (`make setup`) installs nothing, 1 installs
or fails, and auto (`make test`) installs as root on a machine with apt-get, and elsewhere leaves those tests out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browser import MISSING, find_chromium

TIMEOUT_SECONDS = 600
PACKAGES = ("chromium", "fonts-dejavu-core")
"""Without a font, pages would show boxes."""

WITHOUT = "CHROMIUM=0 goes on without it."


class InstallError(Exception):
    """Chromium cannot be installed; the message is the full explanation with the fix."""


def install() -> str | None:
    """Installs Chromium if it is missing and wanted. Returns what it did in one line, or None.

    Raises `InstallError` if it is wanted and cannot be installed.
    """
    wanted = os.environ.get("CHROMIUM") or "0"
    if wanted not in ("0", "1", "auto"):
        raise InstallError(f"CHROMIUM={wanted} must be 0, 1 or auto")
    if wanted == "0" or find_chromium() is not None:
        return None
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        if wanted == "auto":
            return None
        raise InstallError(f"CHROMIUM=1 needs root and apt-get. {MISSING}")
    started = time.monotonic()
    run([apt, "update"])
    run([apt, "install", "--yes", "--no-install-recommends", *PACKAGES])
    if find_chromium() is None:
        raise InstallError(f"apt-get installed a chromium that is no command of this machine. {MISSING}")
    return f"installed Chromium in {time.monotonic() - started:.0f} s"


def run(command: list[str]) -> None:
    """Runs a command without output; raises `InstallError` with the last lines when it fails."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"`{' '.join(command)}` took more than {TIMEOUT_SECONDS} s. {WITHOUT}") from None
    if finished.returncode != 0:
        lines = (finished.stdout + finished.stderr).strip().splitlines()[-12:]
        raise InstallError(f"`{' '.join(command)}` failed. {WITHOUT}\n  " + "\n  ".join(lines))


def main() -> int:
    try:
        done = install()
    except InstallError as error:
        print(f"browser: {error}", file=sys.stderr)
        return 1
    if done:
        print(f"browser: {done}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
