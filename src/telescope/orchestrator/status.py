"""The current state of a run, for live view, watchdog and errors.

Only the orchestrator's event loop writes these fields. Readers on other threads see plain numbers and strings, possibly
a moment old.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One finished training step, for the live view and the log."""

    step: int
    reward_mean: float
    seconds: float
    staleness_mean: float
    tokens_per_second: float
    kl_inference: float
    grad_norm: float
    entropy: float
    waited_share: float


@dataclass
class RunStatus:
    """Progress of one run. `phase` is a short sentence; `components` maps each component to its current activity."""

    run_name: str
    num_steps: int
    phase: str = "starting"
    run_dir: str = ""
    started_at: float = field(default_factory=time.time)
    step: int = 0
    version: int = 0
    components: dict[str, str] = field(default_factory=dict)
    history: list[StepSummary] = field(default_factory=list)
    num_generating: int = 0
    num_slots: int = 0
    num_open_groups: int = 0
    num_finished_groups: int = 0
    num_discarded_groups: int = 0
    num_requeued_groups: int = 0
    num_masked_samples: int = 0
    num_samples_finished: int = 0
    num_tokens_generated: int = 0
    eval_done: int = 0
    eval_total: int = 0
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=6))
    last_progress_at: float = field(default_factory=time.monotonic)
    token_times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=4096))

    def set_component(self, component: str, doing: str) -> None:
        """Sets the current activity of a component (trainer, server, loop)."""
        self.components[component] = doing

    def progressed(self) -> None:
        """Resets the watchdog, because a sample or a step finished."""
        self.last_progress_at = time.monotonic()

    def generated(self, num_tokens: int) -> None:
        """Counts a finished sample and the tokens that were sampled for it."""
        self.num_samples_finished += 1
        self.num_tokens_generated += num_tokens
        self.token_times.append((time.monotonic(), num_tokens))

    def aborted(self, num_tokens: int) -> None:
        """Counts the tokens of a cancelled sample."""
        self.num_tokens_generated += num_tokens

    def tokens_per_second(self, window_seconds: float = 10.0) -> float:
        """Returns tokens sampled per second over the last `window_seconds`."""
        now = time.monotonic()
        recent = [(at, count) for at, count in list(self.token_times) if now - at <= window_seconds]
        return sum(count for _, count in recent) / window_seconds if recent else 0.0

    def seconds_left(self) -> float | None:
        """Estimates the remaining time from the median of the last steps; None before the second step."""
        if len(self.history) < 2:
            return None
        recent = sorted(summary.seconds for summary in self.history[-20:])
        return recent[len(recent) // 2] * (self.num_steps - self.step)
