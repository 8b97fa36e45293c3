"""vLLM's scheduler with a step meter and output batching.

Passed to vLLM with `--scheduler-cls`, so nothing of vLLM is patched. Makes no scheduling decision: every call goes to
vLLM's scheduler. Its steps are counted (`step_meter`), and tokens are batched (`output_batching`) for requests that
want a whole response of token ids, as all requests of a run do. Others, such as a streaming client's, get every token
at once.

Invariant: when a pause for weights completes, every token sampled before it has been sent, so that `policy_version` and
vLLM count it under the weights that sampled it. An aborted request loses its buffered tokens, at most `BATCH_TOKENS` -
1. Imports vllm; only engine processes import this module.
"""

import logging
import os
from pathlib import Path
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs

from telescope.inference.vllm.output_batching import OutputBatcher
from telescope.inference.vllm.step_meter import STEP_METER_VARIABLE, StepMeter

# Two lines at every sync, which would hide the others.
logging.getLogger(Scheduler.__module__).addFilter(lambda record: not str(record.msg).startswith("setting pause state"))


class BatchingScheduler(Scheduler):
    """Scheduler that waits for each step. Steps without tokens (nothing could be scheduled) do not count."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._meter = StepMeter(Path(os.environ[STEP_METER_VARIABLE]))
        self._batcher = OutputBatcher()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        step = super().schedule(*args, **kwargs)
        if step.total_num_scheduled_tokens > 0:
            self._meter.scheduled()
        return step

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        tokens = scheduler_output.total_num_scheduled_tokens
        if tokens > 0:
            self._meter.finished(tokens, len(self.running), began=bool(scheduler_output.scheduled_new_reqs))
        if self._is_stopped():
            self._batcher.release(outputs, EngineCoreOutputs)
        else:
            self._batcher.buffer(outputs, self._may_wait)
        return outputs

    def has_finished_requests(self) -> bool:
        """Returns True also while tokens are buffered during a pause: an empty step sends them before its end."""
        waiting = self._is_stopped() and self._batcher.num_buffered > 0
        return waiting or super().has_finished_requests()

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        ended = super().finish_requests(*args, **kwargs)
        self._batcher.forget(self._is_gone)
        return ended

    def _is_stopped(self) -> bool:
        return bool(self.pause_state == PauseState.PAUSED_ALL)

    def _is_gone(self, request_id: str) -> bool:
        return request_id not in self.requests or bool(self.requests[request_id].is_finished())

    def _may_wait(self, output: Any) -> bool:
        """Returns whether an output may wait. First tokens may not, because vLLM measures the prefill time by them."""
        request = self.requests.get(output.request_id)
        if request is None or request.sampling_params is None:
            return False
        params = request.sampling_params
        return (
            params.output_kind == RequestOutputKind.FINAL_ONLY
            and not params.detokenize
            and not request.resumable
            and request.num_output_tokens > len(output.new_token_ids)
        )


class BatchingAsyncScheduler(BatchingScheduler, AsyncScheduler):
    """Scheduler that schedules ahead: `super()` resolves to vLLM's asynchronous scheduler."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Returns the scheduler that vLLM would choose, with these additions. It is the target of `--scheduler-cls`."""
    chosen = BatchingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else BatchingScheduler
    return chosen(vllm_config=vllm_config, **kwargs)
