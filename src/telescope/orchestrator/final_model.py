"""Saves the trained model of a run where there is space."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from telescope.cluster.reaper import temporary_base
from telescope.errors import RunError
from telescope.orchestrator.status import RunStatus

logger = logging.getLogger(__name__)

SAVE_WAIT_SECONDS = 1800.0
"""How long the run waits for space for the trained model: long enough for a person to free some."""

SAVE_RETRY_SECONDS = 10.0


async def save_where_possible(
    save: Callable[[Path], Awaitable[None]],
    folder: Path,
    status: RunStatus,
    *,
    wait_seconds: float = SAVE_WAIT_SECONDS,
    retry_seconds: float = SAVE_RETRY_SECONDS,
) -> Path:
    """Saves the trained model into `folder`, or else into a temporary folder.

    If neither can, reports it and tries again until `wait_seconds` are over: the weights are lost when the run ends.
    Returns the folder. Raises `RunError` with both problems.
    """
    deadline = time.monotonic() + wait_seconds
    elsewhere = Path(temporary_base(), f"telescope-model-{folder.parent.name}-{time.time_ns():x}")
    announced = False
    while True:
        problems = []
        for candidate in (folder, elsewhere):
            try:
                await save(candidate)
            except OSError as error:
                problems.append(str(error))
                continue
            if problems:
                news = f"the trained model was saved to {candidate}, because {problems[0]}"
                status.report(news, "model", "warning", log=logger)
            return candidate
        what = f"The trained model cannot be saved. {'. '.join(problems)}"
        if not announced:
            announced = True
            news = (
                f"{what}. Free space in one of these folders: saving is tried every {retry_seconds:g} s for "
                f"{wait_seconds / 60:g} min, and the weights are lost after that"
            )
            status.report(news, "model", "error", log=logger)
        if time.monotonic() + retry_seconds > deadline:
            raise RunError(
                f"{what}. Free space in one of these folders before a run ends, or set run_dir to another disk"
            )
        status.progressed()
        await asyncio.sleep(retry_seconds)
