"""Where a run lies."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

RUNS_ROOT = Path("runs")


def choose_run_dir(config: TelescopeConfig, now: datetime | None = None) -> Path:
    """`run_dir` (which TELESCOPE_RUN_DIR fills in), else `runs/<wandb_run_name>-<UTC time>`. Absolute; not created."""
    if config.run_dir is not None:
        return Path(config.run_dir).expanduser().absolute()
    name = re.sub(r"[^\w.-]+", "-", config.wandb_run_name).strip("-.") or "run"
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    return (RUNS_ROOT / f"{name}-{stamp}").absolute()
