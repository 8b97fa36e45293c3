r"""The MATH environment: competition problems with an answer in `\boxed{...}`.

Problems come from the hub (`EleutherAI/hendrycks_math`, the dataset of https://arxiv.org/abs/2103.03874), or from a few
dozen that ship with Telescope (`problems.json`), for tests, demos and machines without a network. The reward is 1 for
an answer that equals the expected one (`parsers.verify_math_answer`) and is as simplified (`worked_out`).
"""

from __future__ import annotations

import json
import random
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment
from telescope.environments.hendrycks_math.worked_out import is_worked_out
from telescope.environments.parsers import extract_boxed_answer, strip_think_tags, verify_math_answer
from telescope.errors import UserError

REQUIRED_PACKAGES = ["math-verify"]
OPTIONAL_PACKAGES = ["datasets"]

HUB_DATASET = "EleutherAI/hendrycks_math"
SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
"""Subsets of the hub's dataset."""

INSTRUCTION_PROMPT = "Think step by step, and put your final answer within \\boxed{}."
_OWN_PROBLEMS = Path(__file__).parent / "problems.json"

_UNSET: Any = object()
"""Distinguishes `instruction_prompt: null` (none) from a missing one (the default)."""


class HendrycksMathEnvironment(SingleTurnEnvironment):
    """Competition problems with one answer each.

    `dataset` is `hub`, `own` (a few dozen shipped problems) or `auto` (the hub's if it is available; else the shipped
    ones, unless `dataset_name` or `dataset_split` select another dataset). `dataset_subset` is a subject or null for
    all. `levels` selects difficulties, 1 to 5. With `seed` the order is shuffled; without, it is the dataset's.
    `verify_timeout_seconds` bounds one comparison.
    """

    reward_min, reward_max = 0.0, 1.0
    metrics_ranges: ClassVar[dict[str, dict[str, float]]] = {
        "correct": {"min": 0.0, "max": 1.0},
        "boxed": {"min": 0.0, "max": 1.0},
    }

    def __init__(
        self,
        system_prompt: str | None = None,
        instruction_prompt: str | None = _UNSET,
        verify_timeout_seconds: float = 5.0,
        **kwargs: Any,
    ) -> None:
        if instruction_prompt is _UNSET:
            instruction_prompt = INSTRUCTION_PROMPT
        super().__init__(system_prompt=system_prompt, instruction_prompt=instruction_prompt, **kwargs)
        self.verify_timeout_seconds = float(verify_timeout_seconds)

    def load_dataset(
        self,
        num_samples: int = -1,
        dataset: str = "auto",
        dataset_name: str = HUB_DATASET,
        dataset_subset: str | None = None,
        dataset_split: str = "train",
        levels: list[int] | None = None,
        seed: int | None = None,
        **_: Any,
    ) -> list[Sample]:
        """The problems as samples. Raises `UserError` when there is none."""
        if dataset not in ("auto", "hub", "own"):
            raise UserError(f"hendrycks_math: dataset is {dataset!r}; use auto, hub or own.")
        if levels is not None and not set(levels) <= {1, 2, 3, 4, 5}:
            raise UserError(f"hendrycks_math: levels is {levels!r}; use some of 1 to 5.")
        rows: list[dict[str, Any]] | None = None
        missing = ""
        if dataset != "own":
            try:
                rows = _hub_rows(dataset_name, dataset_subset, dataset_split)
            except Exception as error:
                # The shipped problems replace the default dataset, and no dataset that the user selected.
                if dataset == "hub" or dataset_name != HUB_DATASET or dataset_split != "train":
                    raise
                missing = f"dataset is 'auto', and {dataset_name} is not available ({type(error).__name__}: {error})"
        if rows is None:
            rows = _own_rows(dataset_subset)
        samples = [sample for row in rows if (sample := _sample(row)) is not None]
        if levels is not None:
            samples = [sample for sample in samples if sample.metadata["level"] in levels]
        if not samples:
            raise UserError(
                f"hendrycks_math: there is no problem with dataset_subset {dataset_subset!r} and levels {levels!r}."
                + (f" These are the shipped problems, because {missing}." if missing else "")
            )
        if seed is not None:
            random.Random(f"hendrycks_math {seed}").shuffle(samples)
        samples = samples if num_samples < 0 else samples[:num_samples]
        if missing:
            self.notice(
                f"hendrycks_math: {missing}. {len(samples)} shipped problems replace it. Set dataset: own in the "
                "kwargs to use them, or dataset: hub to refuse a run without that dataset."
            )
        return samples

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        text = completion.removesuffix(eos_token) if eos_token else completion
        answer = extract_boxed_answer(strip_think_tags(text))
        correct = (
            answer != ""
            and is_worked_out(answer, sample.answer, str(sample.prompt))
            and verify_math_answer(answer, sample.answer, self.verify_timeout_seconds)
        )
        return RewardResult(
            total_reward=float(correct),
            sample_metrics={"correct": float(correct), "boxed": float(answer != "")},
            golden_answers={"answer": sample.answer},
            sample_tags={"level": str(sample.metadata["level"]), "subject": str(sample.metadata["subject"])},
        )


def _hub_rows(name: str, subset: str | None, split: str) -> list[dict[str, Any]]:
    """Rows of the hub's dataset; without a subset, all subjects one after the other."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "hendrycks_math: dataset 'hub' needs the package datasets. Install it with: pip install datasets"
        ) from error
    subsets: tuple[str | None, ...] = SUBJECTS if subset is None and name == HUB_DATASET else (subset,)
    return list(chain.from_iterable(datasets.load_dataset(name, part, split=split) for part in subsets))


def _own_rows(subset: str | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(_OWN_PROBLEMS.read_text(encoding="utf-8"))
    return [
        row for row in rows if subset is None or row["type"].lower().replace(" ", "_").replace("&", "and") == subset
    ]


def _sample(row: dict[str, Any]) -> Sample | None:
    """Returns a dataset row as a sample; None when it has no answer."""
    answer = row.get("answer") or extract_boxed_answer(str(row.get("solution", "")))
    problem = row.get("problem") or row.get("question")
    if not answer or not problem:
        return None
    level = str(row.get("level", ""))
    digits = "".join(character for character in level if character in "0123456789")
    return Sample(
        prompt=str(problem),
        answer=str(answer),
        metadata={"level": int(digits) if digits else 0, "subject": str(row.get("type") or row.get("subject") or "")},
    )
