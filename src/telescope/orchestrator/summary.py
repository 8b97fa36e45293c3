"""The summary of a run: `summary.json`, and the closing lines on the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from telescope.config import TelescopeConfig
from telescope.evals.runner import EvalResult
from telescope.orchestrator.status import RunStatus
from telescope.utils.text import pluralize, single_line


class Interrupted(Exception):
    """The user stopped the run while it was starting or evaluating."""


@dataclass(frozen=True)
class RunSummary:
    """The result of a run. `heldout_*` are accuracies of the first eval with held-out items, else of the first eval.

    `status` is `finished`, `stopped` (by the user) or `failed`; `seconds` is the whole run, `training_seconds` the time
    from the first prompt to the last weight sync.
    """

    status: str
    run_name: str
    run_dir: str
    steps: int
    seconds: float
    training_seconds: float | None
    config_hash: str
    heldout_before: float | None = None
    heldout_after: float | None = None
    heldout_temperature: float | None = None
    heldout_items: int | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    error: str | None = None
    """Why the run failed, in one line."""
    model_dir: str | None = None
    """Folder of the trained model in Hugging Face format; None when none was written."""
    record_error: str | None = None
    """Why the record is incomplete; None when it is complete."""
    evals: list[dict[str, Any]] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """One line for the user, without the error of a failure."""
        steps = pluralize(self.steps, "step")
        if self.status == "finished":
            return f"finished {steps} in {self.seconds:.0f} s"
        if self.status == "stopped":
            return f"stopped after {steps}, as requested"
        return f"failed after {steps}"

    def to_json(self) -> dict[str, Any]:
        """Returns the content of `summary.json`."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def numbers(self) -> dict[str, float]:
        """Returns the numeric fields that are set, for the summary of W&B."""
        return {name: value for name, value in self.to_json().items() if isinstance(value, int | float)}


def headline_of(evals: Sequence[EvalResult]) -> EvalResult | None:
    """Returns the headline result: of the first eval with held-out items, else of the first eval."""
    return next((result for result in evals if result.held_out), evals[0] if evals else None)


def summarize(
    config: TelescopeConfig,
    run_dir: Path,
    status: RunStatus,
    evals: Sequence[EvalResult],
    *,
    seconds: float,
    training_seconds: float | None,
    model_dir: Path | None = None,
    error: BaseException | None,
    interrupted: bool,
    record_error: str | None = None,
) -> RunSummary:
    """Summarizes a run that has ended, with or without an error."""
    if error is not None and not isinstance(error, asyncio.CancelledError | Interrupted):
        outcome, message = "failed", single_line(f"{type(error).__name__}: {error}")
    elif error is not None or interrupted:
        outcome, message = "stopped", None
    else:
        outcome, message = "finished", None
    headline = headline_of(evals)
    of_headline = [r for r in evals if headline is not None and r.name == headline.name]
    before = next((r for r in of_headline if r.version == 0), None)
    after = next((r for r in reversed(of_headline) if r.version > 0), None)
    rewards = [step.reward_mean for step in status.history]
    return RunSummary(
        status=outcome,
        run_name=config.wandb_run_name,
        run_dir=str(run_dir),
        steps=status.step,
        seconds=round(seconds, 3),
        training_seconds=None if training_seconds is None else round(training_seconds, 3),
        config_hash=config.hash,
        heldout_before=before.accuracy if before else None,
        heldout_after=after.accuracy if after else None,
        heldout_temperature=headline.temperature if headline else None,
        heldout_items=headline.num_items if headline else None,
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        error=message,
        record_error=record_error,
        model_dir=None if model_dir is None else str(model_dir),
        evals=[
            {
                "name": r.name, "version": r.version, "accuracy": r.accuracy, "items": r.num_items,
                "scored": r.num_scored, "temperature": r.temperature, "seconds": round(r.seconds, 3),
                "metrics": r.metrics,
            }
            for r in evals
        ],
    )  # fmt: skip
