"""State of the loops after a training step, for checkpoints.

A run continues from this state together with the weights and the optimizer's state: the sampler's position, the outcome
of every prompt so far, the finished groups that wait for a batch, and the error budgets. Prompts whose samples were
still being generated are unfinished, and are sampled again. The learning rate and the seeds of requests are functions
of the step and the prompt, so they need no state.

Invariant: every prompt below `sampler.next_draw` was trained, dropped or held out, is unfinished, or has a group here.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from telescope.errors import UserError
from telescope.orchestrator.groups import Group
from telescope.orchestrator.prompt_sampler import SamplerPosition

STATE_VERSION = 1
"""Version of this format. Raise it when a field changes its meaning."""


@dataclass
class RunState:
    """State of the loops. `step` counts finished training steps, and is the policy version of the weights."""

    step: int = 0
    sampler: SamplerPosition = field(default_factory=SamplerPosition)
    ledger: dict[str, Any] = field(default_factory=dict)
    """See `Ledger.state_dict`."""
    errors: dict[str, Any] = field(default_factory=dict)
    """See `ErrorBudget.state_dict`."""
    num_openings: int = 0
    """Groups opened so far; their numbers bind them to servers."""
    groups: list[Group] = field(default_factory=list)
    """Finished groups that were not trained yet, with tokens and logprobs."""
    data: dict[str, Any] = field(default_factory=dict)
    """Sizes of the datasets and held-out items, on which the numbers of prompts depend. See `resume.describe_data`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as JSON values; arrays keep every bit."""
        values: dict[str, Any] = msgspec.to_builtins(self, enc_hook=_encode, str_keys=True)
        return {"version": STATE_VERSION, **values}

    @classmethod
    def load_state_dict(cls, values: dict[str, Any]) -> RunState:
        """Inverse of `state_dict`. Raises `UserError` for another version or values that are not a state."""
        version = values.get("version")
        if version != STATE_VERSION:
            raise UserError(
                f"The checkpoint's state has version {version}, and this version of Telescope reads version "
                f"{STATE_VERSION}. Resume with the version of Telescope that wrote it, or train from its weights"
            )
        rest = {name: value for name, value in values.items() if name != "version"}
        try:
            return msgspec.convert(rest, cls, dec_hook=_decode, str_keys=True)
        except msgspec.ValidationError as error:
            raise UserError(f"The checkpoint's state cannot be read: {error}") from None


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "base64": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()}
    raise NotImplementedError(f"{type(value).__name__} cannot be saved")


def _decode(wanted: type, value: Any) -> Any:
    if wanted is np.ndarray:
        return np.frombuffer(base64.b64decode(value["base64"]), dtype=value["dtype"]).copy()
    raise NotImplementedError(f"{wanted.__name__} cannot be loaded")
