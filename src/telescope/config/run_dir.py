"""Where a run lies."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from telescope.errors import ConfigError

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

RUNS_ROOT = Path("runs")


def choose_run_dir(config: TelescopeConfig, now: datetime | None = None) -> Path:
    """`run_dir` (which TELESCOPE_RUN_DIR fills in), else `runs/<wandb_run_name>-<UTC time>`. Absolute; not created.

    Raises `ConfigError` for a path that cannot be.
    """
    if config.run_dir is not None:
        try:
            chosen = Path(config.run_dir).expanduser().absolute()
            chosen.exists()  # a name that is too long shows here
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"run_dir is {config.run_dir[:200]!r}, which is no usable path ({error}). Name another folder"
            ) from None
        return chosen
    name = re.sub(r"[^\w.-]+", "-", config.wandb_run_name).strip("-.") or "run"
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    return (RUNS_ROOT / f"{name}-{stamp}").absolute()
