"""Checks before a run that completions can equal the reference answers (golds) of a dataset."""

from __future__ import annotations

import time
from typing import Any

from telescope.environments.base import wrapped_environment
from telescope.errors import UserError

MAX_CHECKED = 200
"""Items that are checked, across the dataset. A comparison takes about a millisecond."""
MAX_SECONDS = 20.0
"""Time limit for one dataset, in case its answers are expensive to read."""


def report_golds(name: str, dataset: Any) -> str | None:
    """Returns a sentence about golds that no completion can equal. None if there are none, or no golds at all.

    `dataset` is an environment or an eval. Raises `UserError` if no completion can equal most of the golds.
    """
    environment = wrapped_environment(dataset)
    if environment is None:
        return None
    count, deadline = len(dataset), time.monotonic() + MAX_SECONDS
    samples = {
        i: dataset.get_sample(i) for i in sorted({i * (count - 1) // (MAX_CHECKED - 1) for i in range(MAX_CHECKED)})
    }
    for index, sample in samples.items():
        if not isinstance(answer := sample.answer, str | None):
            return (
                f"{name}: the answer of item {index} is {answer!r:.80}, of type {type(answer).__name__}. It never "
                "equals a completion, which is a text. Write Sample(prompt, str(answer)), unless the reward converts "
                "it."
            )
    # A class that replaces the reward, or an eval with its own metrics, may read other answers.
    if not issubclass(_owner(environment, "check_gold"), _owner(environment, "compute_reward")):
        return None
    if dataset is not environment and _owner(dataset, "compute_eval_metrics").__module__ != "telescope.evals.base":
        return None
    checked, failures = 0, []
    for index, sample in samples.items():
        check = environment.check_gold(sample)
        if check is None:
            return None
        checked += 1
        if check.problem:
            failures.append(f"item {index}, {str(sample.answer)[:80]!r} ({check.problem})")
        if time.monotonic() > deadline:
            break
    if not failures:
        return None
    found = (
        f"{name}: no completion can equal the answer of {len(failures)} of the {checked} items that were checked, such "
        f"as {'; '.join(failures[:3])}"
    )
    if 2 * len(failures) > checked:
        raise UserError(f"{found}. Give final answers (such as 5, \\frac{{1}}{{2}} or Yes), or choose another reward.")
    return f"{found}. These items never get the reward."


def _owner(instance: Any, method: str) -> type:
    """Returns the class that defines a method of the instance."""
    return next((owner for owner in type(instance).__mro__ if method in vars(owner)), object)
