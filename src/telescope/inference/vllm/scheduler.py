"""The scheduler of an engine, which is vLLM's own with a meter beside it and another way of handing out tokens.

Named to vLLM with `--scheduler-cls`, so that nothing of vLLM is patched. Decides nothing about which request runs when:
every call goes through. The step that comes out is counted (`step_meter`), and the tokens that it brought are gathered
(`gathered_outputs`) for requests whose answer is wanted whole and in token ids, as all of a run are. Others, such as
those of a streaming client, get every token at once.

Invariant: when a pause for weights is over, every token sampled before it has been handed out, so that what counts
tokens by the weights that sampled them (`policy_version`, or vLLM itself) counts them all. A request that is aborted
loses what was held of it, `HELD_TOKENS` - 1 tokens at most. Imports vllm; only an engine's process does so.
"""

from __future__ import annotations

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


class BatchingScheduler(Scheduler):
    """For an engine that waits for a step before it schedules the next. A step without tokens (nothing could be
    scheduled) is not counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._meter = StepMeter(Path(os.environ[STEP_METER_VARIABLE]))
        self._gatherer = OutputBatcher()

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
            self._gatherer.release(outputs, EngineCoreOutputs)
        else:
            self._gatherer.gather(outputs, self._may_hold)
        return outputs

    def has_finished_requests(self) -> bool:
        """As vLLM has it, and whether tokens wait that are to go out: one more step, of nothing, hands them out, and a
        pause is not over before it."""
        waiting = self._is_stopped() and self._gatherer.num_held > 0
        return waiting or super().has_finished_requests()

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        ended = super().finish_requests(*args, **kwargs)
        self._gatherer.forget(self._is_gone)
        return ended

    def _is_stopped(self) -> bool:
        return bool(self.pause_state == PauseState.PAUSED_ALL)

    def _is_gone(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is None or bool(request.is_finished())

    def _may_hold(self, output: Any) -> bool:
        """The first tokens of a request go out at once: vLLM measures from them how long its prompt took."""
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
    """For an engine that schedules ahead. What comes behind `super()` there is vLLM's scheduler for that."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """The scheduler that vLLM would take, with these additions; what `--scheduler-cls` names."""
    chosen = BatchingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else BatchingScheduler
    return chosen(vllm_config=vllm_config, **kwargs)
