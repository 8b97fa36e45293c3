"""The DAPO environment: 17,000 competition problems whose answers are whole numbers.

Problems come from the hub (`BytedTsinghua-SIA/DAPO-Math-17k`, the dataset of https://arxiv.org/abs/2503.14476), or are
the ones that ship with `hendrycks_math`. The dataset's prompts end with their own instruction to write `Answer: ...` in
the last line, so the environment adds none. The reward is the one of `hendrycks_math`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from telescope.environments.base import Sample, shares
from telescope.environments.hub import hub_rows
from telescope.environments.math_problems import MathEnvironment, make_sample, read_golds
from telescope.environments.parsers import extract_boxed_answer

REQUIRED_PACKAGES = ["math-verify"]
OPTIONAL_PACKAGES = ["datasets"]

OWN_INSTRUCTION = 'Think step by step. Then write the result in a last line of its own, as "Answer: " and the number.'
"""Follows the shipped problems, which lack the instruction of the hub's prompts."""

_ANSWER_LINE = re.compile(
    r"(?<![A-Za-z])answer[ \t*_]{0,8}[:\uff1a](?:[\s*_]|(?:\\\[|\$\$)[ \t]*\n){0,20}(.*)$", re.IGNORECASE | re.MULTILINE
)
"""Text may precede it, as in the reward of the paper. The answer may follow in the next line, as formulas do."""


class DapoMathEnvironment(MathEnvironment):
    r"""Competition problems of DAPO-Math-17k, each once. Its arguments are those of `hendrycks_math` but `levels`.

    The answer is the last line `Answer: ...`; without one, the last `\boxed{...}`.
    """

    hub_dataset: ClassVar[str] = "BytedTsinghua-SIA/DAPO-Math-17k"
    metrics_ranges = shares("correct", "answered")
    answered_metric = "answered"

    def __init__(self, instruction_prompt: str | None = None, **kwargs: Any) -> None:
        super().__init__(instruction_prompt=instruction_prompt, **kwargs)

    def extract_answer(self, text: str) -> str:
        lines = list(filter(None, _ANSWER_LINE.findall(text)))
        if not lines:
            return extract_boxed_answer(text)
        return extract_boxed_answer(lines[-1]) or lines[-1].strip(" \t*_").removesuffix(".")

    def hub_samples(self, name: str, subsets: Sequence[str | None], split: str) -> list[Sample]:
        """Returns every problem once. The hub's dataset repeats each a hundred times."""
        samples: dict[str, Sample | None] = {}
        for row in hub_rows(self.name, name, subsets, split, [("prompt",), ("reward_model",)], only=True):
            messages, truth = row["prompt"], row["reward_model"]
            if isinstance(truth, dict):
                truth = truth.get("ground_truth")
            if isinstance(messages, list) and len(messages) == 1 and messages[0].get("role") == "user":
                messages = messages[0].get("content")
            key = messages if isinstance(messages, str) else json.dumps(messages, default=str)
            if key not in samples:
                samples[key] = make_sample(messages, read_golds(truth), {})
        return [sample for sample in samples.values() if sample is not None]

    def own_samples(self, subset: str | None) -> list[Sample]:
        """Returns the shipped problems whose answer is a whole number."""
        return [
            Sample(f"{sample.prompt}\n\n{OWN_INSTRUCTION}", answer=sample.answer)
            for sample in super().own_samples(subset)
            if re.fullmatch(r"-?[0-9]+", sample.answer)
        ]
