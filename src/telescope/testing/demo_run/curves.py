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
        draw, loops = self.draw(step), self.looping(step)
        progress = 1 - math.exp(-step * self.story.learning / 350)

        def noisy(value: float, width: float) -> float:
            return value * float(np.exp(draw.normal(0, width)))

        grad_norm = noisy(0.42 - 0.14 * progress + 0.5 * loops, 0.16) * (23 if step == self.story.spike else 1)
        difference = noisy(0.0095, 0.08)
        mismatch = {
            "logprob_difference_mean": difference, "logprob_difference_p95": 4.6 * difference,
            "logprob_difference_max": noisy(40 * difference, 0.3), "ratio_outside_share": noisy(0.012, 0.1),
        }  # fmt: skip
        clip = {"low_share": noisy(0.0021, 0.3), "high_share": noisy(0.0034, 0.3)}
        of_tokens = {
            "entropy": noisy((0.62 - 0.34 * progress) * (1 - 0.4 * loops), 0.03),
            "kl_divergence_inference": noisy(0.0011 * (1 + 5 * loops) * (1 + 0.5 * age_mean), 0.25), **mismatch,
        }  # fmt: skip
        loss = noisy(-0.012, 0.4)
        if step == self.story.not_finite:
            loss = grad_norm = math.nan
        metrics = {
            **{name: of_tokens[name] for name in ("entropy", "kl_divergence_inference")},
            "grad_norm": grad_norm, "loss/policy": loss,
            "learning_rate": self.story.learning_rate * min(1.0, (step + 1) / 20), "optimizer_steps": 1.0,
            "micro_batches": 2.0, "tokens/trained": float(num_tokens), "advantage/token_abs_mean": noisy(0.82, 0.04),
            "mismatch/on_policy_share": max(0.0, 1 - age_mean), "mismatch/logprob_difference_allowed": 0.08,
            "staleness/token_age_mean": age_mean, "staleness/token_age_max": float(math.ceil(age_mean)),
            **{f"mismatch/{name}": value for name, value in mismatch.items()},
            **{f"clip/{name}": value for name, value in clip.items()},
        }  # fmt: skip
        for age, share in (("age_0", 1 - age_mean), ("age_1", age_mean)):
            if share > 0.01:
                rows = {
                    **of_tokens,
                    **{f"clip_{name}": value for name, value in clip.items()},
                    "tokens": num_tokens * share,
                }
                metrics |= {f"staleness/{age}/{name}": value for name, value in rows.items()}
        for task, factor, share in zip(TASKS, (1.1, 0.85, 0.7), (0.5, 0.3, 0.2), strict=True):
            rows = {name: noisy(value * factor, 0.03) for name, value in of_tokens.items()} | {
                "tokens": num_tokens * share
            }
            metrics |= {f"environment/{task}/{name}": value for name, value in rows.items()}
        return metrics
