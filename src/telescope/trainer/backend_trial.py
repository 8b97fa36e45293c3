"""Trying the class that `train_backend` names, before anything is started: in a process of its own, without torch here.

Owns only the question. What a backend is and how it is found belongs to `telescope.trainer.backends`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from telescope.errors import ConfigError

TRIAL_TIMEOUT_SECONDS = 300.0
"""Importing torch and a backend from a cold disk."""

_TRIAL = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from telescope.errors import UserError
from telescope.trainer.backends import find_backend
try:
    find_backend(sys.argv[2])
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


def try_backend(name: str) -> None:
    """Raises `ConfigError` when `name` is a class path behind which there is no training backend.

    The folder that the run is started from is searched as well, as it is in the trainer's processes.
    """
    if ":" not in name:
        return
    path = json.dumps([*sys.path, str(Path.cwd())])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL, path, name], capture_output=True, text=True, timeout=TRIAL_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"train_backend: importing {name!r} took more than {TRIAL_TIMEOUT_SECONDS:.0f} s. Move slow work from its "
            "module into init()"
        ) from error
    if done.returncode == 2:
        raise ConfigError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise ConfigError(f"train_backend: importing {name!r} ended its process:\n{done.stderr.strip()[-2000:]}")
