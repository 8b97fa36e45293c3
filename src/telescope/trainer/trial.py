"""Tries a configuration's backend and model before anything starts.

Each runs in a separate process. This module does not import torch, because a command that refuses its input must not
wait for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from telescope.errors import ConfigError, UserError
from telescope.utils.process import describe_exit

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

TRIAL_TIMEOUT_SECONDS = 300.0
"""Time for importing torch, and a backend or a small copy of the model, from a slow disk."""


def try_backend(config: TelescopeConfig) -> None:
    """Raises `ConfigError` if `train_backend` names no class of a training backend.

    Also searches the folder from which the run is started, like the trainer's processes.
    """
    if ":" in config.train_backend:
        fix = "Move slow work from its module into functions"
        _try("backend", config.train_backend, config, f"train_backend: importing {config.train_backend!r}", fix)


def try_model(config: TelescopeConfig) -> None:
    """Raises `ConfigError` if weight files do not fit config.json, or if the trainer computes the model incorrectly."""
    _try("model", config.model, config, f"model: trying {config.model!r}", "Check the disk, or the way to the hub")


def _try(what: str, name: str, config: TelescopeConfig, action: str, fix: str) -> None:
    """Runs this module in a process with the same import paths. `fix` is the advice for a timeout."""
    command = [sys.executable, "-P", "-m", "telescope.trainer.trial", what, name]
    command += [str(config.trust_remote_code), str(config.max_model_len)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path.cwd())])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{action} took more than {TRIAL_TIMEOUT_SECONDS:.0f} s. {fix}") from error
    if done.returncode == 2:
        raise ConfigError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise ConfigError(f"{action}: its process {describe_exit(done.returncode)}:\n{done.stderr.strip()[-2000:]}")


def _main(what: str, name: str, trust_remote_code: str, max_model_len: str) -> None:
    if what == "backend":
        from telescope.trainer.backends import find_backend

        find_backend(name)
        return
    from telescope.config.model_source import is_downloaded
    from telescope.trainer.capability import choose_execution
    from telescope.trainer.model import check_weight_files

    trusted = trust_remote_code == "True"
    if is_downloaded(name):
        check_weight_files(name, trust_remote_code=trusted)
    choose_execution(name, int(max_model_len), trust_remote_code=trusted)


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
