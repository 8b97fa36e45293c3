"""How the generated run goes: what it learns, how long things take, and what goes wrong and when."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from telescope.testing.demo_run.tasks import TASKS

SKILLS = {"countdown": (0.40, 0.50, 330.0), "algebra": (0.34, 0.36, 420.0), "calculator_agent": (0.42, 0.60, 200.0)}
"""Skill at the start, what is learned, and in how many steps, by task."""

STEEPNESS = 6.0
"""How much a difference between skill and difficulty decides."""


@dataclass(frozen=True)
class Story:
    """Events of a run, in steps. None: it does not happen."""

    loops: tuple[int, int] | None = None
    """Answers repeat themselves until they are cut off, and evals fall."""
    spike: int | None = None
    """The gradient norm of a single step."""
    server_down: tuple[int, int] | None = None
    """Server 2 is restarted."""
    slow_from: int | None = None
    """Answers take longer than a training step."""
    not_finite: int | None = None
    """The loss is not a number, and the run fails."""
    learning: float = 1.0
    """Speed of learning."""
    learning_rate: float = 1e-6
    skipped_eval: int | None = None


@dataclass
class Curves:
    """Numbers of each step. The same for the same seed."""

    story: Story
    seed: int = 0
    _starts: list[float] = field(default_factory=lambda: [0.0])
    _waits: list[float] = field(default_factory=list)

    def draw(self, step: int) -> np.random.Generator:
        """Returns the random numbers of a step."""
        return np.random.default_rng((self.seed, step + 1))

    def skill(self, task: str, step: int) -> float:
        """Returns the skill in a task after `step` steps."""
        start, gain, steps = SKILLS[task]
        learned = gain * (1 - math.exp(-step * self.story.learning / steps))
        return start + learned - 0.45 * self.looping(step)

    def chance(self, task: str, step: int, difficulty: float) -> float:
        """Returns the probability of a right answer."""
        return 1 / (1 + math.exp(-STEEPNESS * (self.skill(task, step) - difficulty)))

    def looping(self, step: int) -> float:
        """Returns the share of answers that repeat themselves."""
        if self.story.loops is None:
            return 0.004
        first, last = self.story.loops
        place = (step - first) / (last - first)
        return 0.004 + (0.36 * math.sin(math.pi * place) ** 2 if 0 < place < 1 else 0.0)

    def start(self, step: int) -> float:
        """Returns when a step starts, in seconds after the first."""
        while len(self._starts) <= step:
            done = len(self._waits)
            self._waits.append(self._wait(done))
            active = 1.9 + 0.25 * float(self.draw(done).random()) + 1.2 * self.looping(done)
            self._starts.append(self._starts[done] + self._waits[done] + active)
        return self._starts[step]

    def wait(self, step: int) -> float:
        """Returns how long a step waits for its batch, in seconds."""
        self.start(step + 1)
        return self._waits[step]

    def is_down(self, server: int, step: int) -> bool:
        """Returns whether a server is being restarted."""
        down = self.story.server_down
        return down is not None and server == 2 and down[0] <= step < down[1]

    def _wait(self, step: int) -> float:
        noise = self.draw(step).gamma(4.0, 0.25)
        base = 0.35 + 0.5 * math.exp(-step / 80) + 1.2 * self.looping(step)
        if self.story.slow_from is not None:
            base += 2.6 / (1 + math.exp(-(step - self.story.slow_from) / 6))
        return base * (0.6 + 0.4 * noise) + (1.5 if self.is_down(2, step) else 0.0)

    def training_metrics(self, step: int, num_tokens: int, age_mean: float) -> dict[str, float]:
        """Returns what the trainer measures besides times."""
        draw = self.draw(step)
        noise = lambda width: float(np.exp(draw.normal(0, width)))  # noqa: E731
        loops = self.looping(step)
        progress = 1 - math.exp(-step * self.story.learning / 350)
        entropy = (0.62 - 0.34 * progress) * noise(0.03) * (1 - 0.4 * loops)
        kl = 0.0011 * noise(0.25) * (1 + 5 * loops) * (1 + 0.5 * age_mean)
        grad_norm = (0.42 - 0.14 * progress + 0.5 * loops) * noise(0.16)
        if step == self.story.spike:
            grad_norm *= 23
        difference = 0.0095 * noise(0.08)
        loss = -0.012 * noise(0.4)
        if step == self.story.not_finite:
            loss = grad_norm = math.nan
        mismatch = {
            "logprob_difference_mean": difference, "logprob_difference_p95": 4.6 * difference,
            "logprob_difference_max": 40 * difference * noise(0.3), "ratio_outside_share": 0.012 * noise(0.1),
        }  # fmt: skip
        clip_low, clip_high = 0.0021 * noise(0.3), 0.0034 * noise(0.3)
        of_row = {"entropy": entropy, "kl_divergence_inference": kl, **mismatch}
        metrics = {
            "entropy": entropy, "kl_divergence_inference": kl, "grad_norm": grad_norm, "loss/policy": loss,
            "learning_rate": self.story.learning_rate * min(1.0, (step + 1) / 20), "optimizer_steps": 1.0,
            "micro_batches": 2.0, "tokens/trained": float(num_tokens), "advantage/token_abs_mean": 0.82 * noise(0.04),
            "clip/low_share": clip_low, "clip/high_share": clip_high,
            "mismatch/on_policy_share": max(0.0, 1 - age_mean),
            "staleness/token_age_mean": age_mean, "staleness/token_age_max": float(math.ceil(age_mean)),
            **{f"mismatch/{name}": value for name, value in mismatch.items()},
        }  # fmt: skip
        for age, share in (("age_0", 1 - age_mean), ("age_1", age_mean)):
            if share > 0.01:
                rows = {
                    **of_row,
                    "clip_low_share": clip_low,
                    "clip_high_share": clip_high,
                    "tokens": num_tokens * share,
                }
                metrics |= {f"staleness/{age}/{name}": value for name, value in rows.items()}
        for place, task in enumerate(TASKS):
            factor = (1.1, 0.85, 0.7)[place] * noise(0.03)
            rows = {name: value * factor for name, value in of_row.items()} | {
                "tokens": num_tokens * (0.5, 0.3, 0.2)[place]
            }
            metrics |= {f"environment/{task}/{name}": value for name, value in rows.items()}
        return metrics
