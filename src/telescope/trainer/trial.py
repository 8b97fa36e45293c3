"""Tries a configuration's backend and model before anything starts.

Each runs in a separate process. Imports no torch here: a command that refuses its input must not wait for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from telescope.config.model_contents import CAUSAL_LM_CLASSES
from telescope.config.model_files import architecture_of
from telescope.errors import ConfigError
from telescope.utils.process import describe_exit

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

TRIAL_TIMEOUT_SECONDS = 300.0
"""Importing torch and a backend from a cold disk."""

_SCRIPT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from telescope.errors import UserError
def run(name, trust_remote_code):
    {body}
try:
    run(sys.argv[2], sys.argv[3] == "True")
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""

_BACKEND = """
    from telescope.trainer.backends import find_backend
    find_backend(name)
"""

_MODEL = """
    import torch
    from telescope.trainer.model import load_causal_lm
    load_causal_lm(name, torch.float32, with_weights=False, trust_remote_code=trust_remote_code)
"""


def try_backend(config: TelescopeConfig) -> None:
    """Raises `ConfigError` when `train_backend` names no training backend class.

    The folder that the run is started from is searched as well, as it is in the trainer's processes.
    """
    if ":" in config.train_backend:
        _try(_BACKEND, config.train_backend, config, f"train_backend: importing {config.train_backend!r}")


def try_model(config: TelescopeConfig) -> None:
    """Raises `ConfigError` when the trainer cannot build the model's architecture.

    Architectures whose tensors preflight compares are known to work and are not built.
    """
    model_type = architecture_of(config)
    if model_type is not None and model_type not in CAUSAL_LM_CLASSES:
        _try(_MODEL, config.model, config, f"model: building {config.model!r} ({model_type})")


def _try(body: str, name: str, config: TelescopeConfig, what: str) -> None:
    script = _SCRIPT.replace("{body}", body.strip())
    path = json.dumps([*sys.path, str(Path.cwd())])
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, path, name, str(config.trust_remote_code)],
            capture_output=True,
            text=True,
            timeout=TRIAL_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{what} took more than {TRIAL_TIMEOUT_SECONDS:.0f} s. Move slow work from its module into functions"
        ) from error
    if done.returncode == 2:
        raise ConfigError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise ConfigError(f"{what}: its process {describe_exit(done.returncode)}:\n{done.stderr.strip()[-2000:]}")
