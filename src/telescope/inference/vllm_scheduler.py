"""The scheduler of an engine, which is vLLM's own with a meter beside it.

Named to vLLM with `--scheduler-cls`, so that nothing of vLLM is patched. Decides nothing: every call goes through, and
the step that comes out of it is counted (`step_meter`). Imports vllm; only an engine's process does so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from telescope.inference.step_meter import STEP_METER_VARIABLE, StepMeter


class _Metered:
    """Goes before one of vLLM's schedulers. A step without tokens (nothing could be scheduled) is not counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._meter = StepMeter(Path(os.environ[STEP_METER_VARIABLE]))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        step = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if step.total_num_scheduled_tokens > 0:
            self._meter.scheduled()
        return step

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if scheduler_output.total_num_scheduled_tokens > 0:
            self._meter.finished(scheduler_output.total_num_scheduled_tokens, len(self.running))  # type: ignore[attr-defined]
        return outputs


class MeteredScheduler(_Metered, Scheduler):
    """For an engine that waits for a step before it schedules the next."""


class MeteredAsyncScheduler(_Metered, AsyncScheduler):
    """For an engine that schedules ahead."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """The scheduler that vLLM would take, metered; what `--scheduler-cls` names."""
    chosen = MeteredAsyncScheduler if vllm_config.scheduler_config.async_scheduling else MeteredScheduler
    return chosen(vllm_config=vllm_config, **kwargs)
