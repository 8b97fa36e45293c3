"""Series of step metrics that are healthy but for what a test changes."""

import random

from telescope.health import rules
from telescope.health.rules import EvalPoint, History

WAIT, SECONDS = rules.WAIT.split(" / ")
IDLE, _ = rules.IDLE.split(" / ")


def ordinary(seed: int) -> dict[str, float]:
    """Metrics of a step within the noise of a small run."""
    draw = random.Random(seed)
    return {
        rules.ENTROPY: 0.6 * draw.uniform(0.7, 1.3), rules.REWARD: 0.4 * draw.uniform(0.8, 1.2),
        rules.KL: 1e-4 * draw.uniform(0.2, 5), rules.GRAD_NORM: 0.3 * draw.uniform(0.3, 3),
        rules.TRUNCATED: draw.uniform(0, 15), rules.NO_SIGNAL: draw.uniform(0, 60), rules.STALE: draw.uniform(0, 5),
        rules.AGE: draw.uniform(0, 2), rules.LENGTH: draw.uniform(200, 230), rules.REPETITION: draw.uniform(2, 2.3),
        SECONDS: 10.0, WAIT: draw.uniform(0, 4), IDLE: draw.uniform(0, 4),
    }  # fmt: skip


def history(
    changes: dict[str, list[float | None]] | None = None, evals: tuple[EvalPoint, ...] = (), num_steps: int = 60
) -> History:
    """A healthy run whose metrics end with `changes`."""
    steps = [ordinary(step) for step in range(num_steps)]
    columns: dict[str, list[float | None]] = {name: [step[name] for step in steps] for name in steps[0]}
    for name, values in (changes or {}).items():
        column = columns.setdefault(name, [None] * num_steps)
        column[num_steps - len(values) :] = values
    return History(columns, range(num_steps), evals)
