"""Defines the state of the loops after a training step, for checkpoints.

A run continues from this state together with the weights and the optimizer's state: the sampler's position, the outcome
of every prompt so far, the finished groups that wait for a batch, the error budgets, and the results of evals. Prompts
with running samples are unfinished, and are sampled again. The learning rate and the seeds of requests are functions of
the step and the prompt, so they need no state.

When the trainer's ranks restart from a checkpoint c, the loops continue from its state and the finished groups in
memory (`after_restart`). Tokens of a version l > c were sampled by weights that are lost, because versions after c will
have other weights. They are labeled 2c - l, so that the age of a token remains the number of optimizer steps between
the weights that sampled it and the weights that train on it: l - c steps back to the checkpoint, plus the steps after
it. A label is below c, so no lost version counts as current, and `max_off_policy_steps` bounds these tokens like all
others.

Invariant: every prompt below `sampler.next_draw` was trained, dropped or held out, is unfinished, or has a group here.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from telescope.errors import UserError
from telescope.evals.runner import EvalResult
from telescope.orchestrator.async_window import Ledger, Staleness
from telescope.orchestrator.groups import Group
from telescope.orchestrator.prompt_sampler import SamplerPosition
from telescope.utils.text import single_line

STATE_VERSION = 1  # Version of this format. Raise it when a field changes its meaning.


@dataclass
class RunState:
    """State of the loops. `step` counts finished training steps, and is the policy version of the weights."""

    step: int = 0
    sampler: SamplerPosition = field(default_factory=SamplerPosition)
    ledger: Ledger = field(default_factory=Ledger)
    errors: dict[str, list[tuple[int, str] | None]] = field(default_factory=dict)
    """See `ErrorBudget.state_dict`."""
    groups: list[Group] = field(default_factory=list)
    """Finished, untrained groups, with tokens and logprobs."""
    data: dict[str, Any] = field(default_factory=dict)
    """Sizes of the datasets and held-out items, which determine the prompts' numbers. See `resume.describe_data`."""
    evals: list[EvalResult] = field(default_factory=list)
    """See `Evaluation.history`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as JSON values. Arrays keep every bit."""
        values: dict[str, Any] = msgspec.to_builtins(self, enc_hook=_encode, str_keys=True)
        return {"version": STATE_VERSION, **values}

    @classmethod
    def load_state_dict(cls, values: dict[str, Any]) -> RunState:
        """Inverse of `state_dict`. Raises `UserError` for another version or an invalid state."""
        version = values.get("version") if isinstance(values, dict) else None
        if version != STATE_VERSION:
            raise UserError(
                f"The checkpoint's state has version {version}, and this version of Telescope reads version "
                f"{STATE_VERSION}. Resume with the version of Telescope that wrote it, or train from its weights"
            )
        rest = {name: value for name, value in values.items() if name != "version"}
        try:
            rest["ledger"]["requeues"] = dict(rest["ledger"]["requeues"])  # earlier versions wrote a list of pairs
            return msgspec.convert(rest, cls, dec_hook=_decode, str_keys=True)
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # also from `_decode`
            reason = single_line(f"{type(error).__name__}: {error}")
            raise UserError(f"The checkpoint's state cannot be read: {reason}. Use another step") from None


def after_restart(checkpoint: RunState, lost: RunState, staleness: Staleness, *, synchronous: bool) -> RunState:
    """Returns the checkpoint's state with the finished groups of `lost`, from which the loops continue.

    `lost` is the state when the ranks were lost; its groups are relabeled in place. Groups that are too old now are
    sampled again. In synchronous mode, so are all groups with tokens of lost versions.
    """
    known = {group.group_id for group in checkpoint.groups}
    kept = [
        group
        for group in lost.groups
        if group.group_id not in known
        and (_newest_version(group) <= checkpoint.step or not synchronous)
        and _relabel(group, checkpoint.step)
        and not staleness.is_stale(group, checkpoint.step)
    ]
    kept_ids = {group.group_id for group in kept}
    first = checkpoint.sampler.next_draw
    next_draw = max([first, *(n + 1 for n in kept_ids)])
    unfinished = {*checkpoint.sampler.unfinished, *range(first, next_draw)} - kept_ids
    ledger = checkpoint.ledger
    return RunState(
        step=checkpoint.step,
        sampler=SamplerPosition(next_draw, tuple(sorted(unfinished))),
        ledger=replace(
            ledger,
            open=ledger.open | kept_ids,
            num_opened=ledger.num_opened + len(kept),
            requeues=ledger.requeues | {group.group_id: group.num_requeues for group in kept if group.num_requeues},
        ),
        errors=lost.errors,
        groups=[*checkpoint.groups, *kept],
        data=lost.data,
    )


def _newest_version(group: Group) -> int:
    return max((sample.totals.version_range[1] for sample in group.samples), default=-1)


def _relabel(group: Group, step: int) -> bool:
    """Relabels tokens that versions after `step` sampled. Returns whether that is possible (2 * step >= newest)."""
    if _newest_version(group) > 2 * step:
        return False

    def label(version: int) -> int:
        return min(version, 2 * step - version)

    for sample in group.samples:
        sample.relabel(label)
    oldest = group.oldest_version()
    group.start_version = min(label(group.start_version), group.start_version if oldest is None else oldest)
    return True


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "base64": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()}
    if isinstance(value, pa.RecordBatch):
        with pa.BufferOutputStream() as stream, pa.ipc.new_stream(stream, value.schema) as writer:
            writer.write_batch(value)
        return base64.b64encode(stream.getvalue()).decode()
    raise NotImplementedError(f"{type(value).__name__} cannot be saved")


def _decode(wanted: type, value: Any) -> Any:
    if wanted is np.ndarray:
        return np.frombuffer(base64.b64decode(value["base64"]), dtype=value["dtype"]).copy()
    if wanted is pa.RecordBatch:
        return pa.ipc.open_stream(base64.b64decode(value)).read_next_batch()
    raise NotImplementedError(f"{wanted.__name__} cannot be loaded")
