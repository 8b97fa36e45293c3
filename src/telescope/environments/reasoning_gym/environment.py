"""Procedural tasks of the package reasoning-gym: `reasoning_gym:chain_sum`.

Questions and scores are the package's. Some of its scores evaluate the model's answer as Python. They are made safe
here, because code that a model writes must not run outside a sandbox.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from telescope.environments.arguments import refuse_unknown
from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment, shares
from telescope.environments.parsers import extract_answer_tags, strip_think_tags
from telescope.errors import UserError
from telescope.utils.text import did_you_mean

REQUIRED_PACKAGES = ["reasoning-gym"]
TAKES_TASK = True

INSTRUCTION = "Write the final answer between <answer> and </answer>."

_FORMULA = re.compile(r"(?:[^\W\d_]\b(?!\s*\()|(?:a?(?:sin|cos|tan)h?|exp|log|sqrt|Abs)\b|[\d\s+\-*/^()=,]|\d\.\d)*")
"""Numbers, operators, letters as variables, and functions: what may be evaluated as a formula. No attributes, no
strings, and no call of a letter, such as sympy's `S("...")`."""


class ReasoningGym(SingleTurnEnvironment):
    """One procedural task of reasoning-gym, named after a colon: `reasoning_gym:chain_sum`.

    `size` questions are generated from `seed`; `options` are those of the task, such as `{max_terms: 3}`. The reward is
    the task's own score of the text between the last answer tags, from 0 to 1.
    """

    task = ""
    reward_min, reward_max = 0.0, 1.0
    metrics_ranges = shares("correct", "answered")

    def __init__(self, instruction_prompt: str | None = INSTRUCTION, **kwargs: Any) -> None:
        super().__init__(instruction_prompt=instruction_prompt, **kwargs)

    def load_dataset(
        self, num_samples: int = -1, size: int = 1000, seed: int = 0, options: Mapping[str, Any] | None = None, **_: Any
    ) -> list[Sample]:
        """Generates `size` questions, or the first `num_samples` of them."""
        from reasoning_gym.factory import DATASETS, create_dataset

        if self.task not in DATASETS:
            hint = did_you_mean(self.task, DATASETS)
            raise UserError(f"reasoning_gym has no task {self.task!r}.{hint} It has: {', '.join(sorted(DATASETS))}.")
        known = {field.name for field in fields(DATASETS[self.task][1])} - {"size", "seed"}
        refuse_unknown(options or {}, known, f"The task {self.name!r}")
        self._dataset = create_dataset(self.task, size=size, seed=seed, **(options or {}))
        module = sys.modules[type(self._dataset).__module__]
        source = inspect.getsource(module)
        self._scores_formula = "parse_expr(answer" in source
        if "eval(answer)" in source:
            vars(module)["eval"] = ast.literal_eval  # found before the built-in one
        state = random.getstate()
        random.seed(seed)  # some generators use Python's shared random state
        try:
            entries = [self._dataset[index] for index in range(size if num_samples < 0 else min(num_samples, size))]
        finally:
            random.setstate(state)
        samples = []
        for entry in entries:
            samples.append(Sample(entry["question"], "" if entry["answer"] is None else str(entry["answer"])))
            vars(samples[-1])["entry"] = entry  # an attribute, because its index must not identify the sample
        return samples

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        """Returns the task's score of the answer."""
        text = strip_think_tags(completion).replace(self.instruction_prompt or "", "")  # it contains tags
        answer = extract_answer_tags(text)
        score = 0.0
        if not self._scores_formula or _FORMULA.fullmatch(answer):
            with contextlib.suppress(Exception):  # some tasks raise for an answer that they cannot read
                score = float(self._dataset.score_answer(answer or None, vars(sample)["entry"]))
        return RewardResult(
            total_reward=score,
            sample_metrics={"correct": float(score == 1.0), "answered": float(bool(answer))},
            golden_answers={"answer": sample.answer or None},
        )
