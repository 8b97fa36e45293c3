r"""Base of the mathematical environments: prompts, scoring, and shipped problems.

Used by `hendrycks_math`, `dapo_math` and `deepscaler`, and by the evals of `telescope.evals.math_benchmark`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from telescope.environments.base import ChatMessage, RewardResult, Sample, SingleTurnEnvironment
from telescope.environments.hendrycks_math.worked_out import is_worked_out
from telescope.environments.hub import hub_rows
from telescope.environments.parsers import extract_boxed_answer, strip_think_tags, verify_math_answer
from telescope.errors import UserError

COLUMNS = (("problem", "question"), ("answer", "solution"))
"""Columns of a dataset of problems. Without an answer, it is the last box of the solution."""

INSTRUCTION_PROMPT = "Think step by step, and put your final answer within \\boxed{}."
_OWN_PROBLEMS = Path(__file__).parent / "hendrycks_math" / "problems.json"

_UNSET: Any = object()
"""Distinguishes `instruction_prompt: null` (none) from a missing one (the default)."""


class MathEnvironment(SingleTurnEnvironment):
    """Competition problems with one answer each, of the dataset `hub_dataset`.

    `dataset` is `hub`, `own` (a few dozen shipped problems) or `auto` (the hub's if it is available; else the shipped
    ones, unless `dataset_name` or `dataset_split` select another dataset). With `seed` the order is shuffled; without,
    it is the dataset's. `instruction_prompt` precedes a problem, `instruction_prompt_post` follows it.
    `verify_timeout_seconds` bounds one comparison.
    """

    hub_dataset: ClassVar[str]
    reward_min, reward_max = 0.0, 1.0
    metrics_ranges: ClassVar[dict[str, dict[str, float]]] = {
        "correct": {"min": 0.0, "max": 1.0},
        "boxed": {"min": 0.0, "max": 1.0},
    }
    answered_metric: ClassVar[str] = "boxed"
    """Metric that is 1 when `extract_answer` finds an answer."""

    def __init__(
        self,
        system_prompt: str | None = None,
        instruction_prompt: str | None = _UNSET,
        instruction_prompt_post: str | None = None,
        verify_timeout_seconds: float = 5.0,
        **kwargs: Any,
    ) -> None:
        if instruction_prompt is _UNSET:
            instruction_prompt = INSTRUCTION_PROMPT
        super().__init__(system_prompt=system_prompt, instruction_prompt=instruction_prompt, **kwargs)
        self.instruction_prompt_post = instruction_prompt_post
        self.verify_timeout_seconds = float(verify_timeout_seconds)

    def load_dataset(
        self,
        num_samples: int = -1,
        dataset: str = "auto",
        dataset_name: str | None = None,
        dataset_subset: str | None = None,
        dataset_split: str = "train",
        seed: int | None = None,
        **_: Any,
    ) -> list[Sample]:
        """Returns the problems as samples. Raises `UserError` if there is none."""
        name = dataset_name or self.hub_dataset
        return self.hub_or_own(
            num_samples,
            seed,
            dataset,
            name,
            hub=lambda: self.hub_samples(name, dataset_subset, dataset_split),
            own=self.own_samples,
            own_replaces_hub=name == self.hub_dataset and dataset_split == "train",
            selection=f"an answer in {name}",
        )

    def hub_samples(self, name: str, subset: str | None, split: str) -> list[Sample]:
        """Returns the problems of a dataset of the hub."""
        return samples_of(hub_rows(self.name, name, [subset], split, COLUMNS))

    def own_samples(self) -> list[Sample]:
        """Returns the problems that ship with Telescope."""
        return samples_of(own_problems())

    def hub_or_own(
        self,
        num_samples: int,
        seed: int | None,
        dataset: str,
        dataset_name: str,
        *,
        hub: Callable[[], list[Sample]],
        own: Callable[[], list[Sample]],
        own_replaces_hub: bool,
        selection: str,
    ) -> list[Sample]:
        """Returns the first `num_samples` of `hub` or `own`, as `dataset` selects.

        They are shuffled before if there is a `seed`. With `auto`, `own` is used with a notice when `hub` raises and
        `own_replaces_hub`. Raises `UserError` with `selection` as the reason if there is no sample.
        """
        if dataset not in ("auto", "hub", "own"):
            raise UserError(f"{self.name}: dataset is {dataset!r}; use auto, hub or own.")
        missing = ""
        if dataset == "own":
            samples = own()
        else:
            try:
                samples = hub()
            except Exception as error:
                if dataset == "hub" or not own_replaces_hub:
                    raise
                missing = f"dataset is 'auto', and {dataset_name} is not available ({type(error).__name__}: {error})"
                samples = own()
        if not samples:
            raise UserError(
                f"{self.name}: there is no problem with {selection}."
                + (f" These are the shipped problems, because {missing}." if missing else "")
            )
        if seed is not None:
            random.Random(f"hendrycks_math {seed}").shuffle(samples)
        samples = samples if num_samples < 0 else samples[:num_samples]
        if missing:
            self.notice(
                f"{self.name}: {missing}. {len(samples)} shipped problems replace it. Set dataset: own in the "
                "kwargs to use them, or dataset: hub to refuse a run without that dataset."
            )
        return samples

    def build_messages(self, question: str | Sequence[ChatMessage]) -> list[ChatMessage]:
        if isinstance(question, str) and self.instruction_prompt_post:
            question = f"{question.rstrip()}\n\n{self.instruction_prompt_post.lstrip()}"
        return super().build_messages(question)

    def extract_answer(self, text: str) -> str:
        """Returns the final answer in a completion without thinking, or `""`."""
        return extract_boxed_answer(text)

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        text = completion.removesuffix(eos_token) if eos_token else completion
        answer = self.extract_answer(strip_think_tags(text))
        correct = (
            answer != ""
            and is_worked_out(answer, sample.answer, str(sample.prompt))
            and verify_math_answer(answer, sample.answer, self.verify_timeout_seconds)
        )
        return RewardResult(
            total_reward=float(correct),
            sample_metrics={"correct": float(correct), self.answered_metric: float(answer != "")},
            golden_answers={"answer": sample.answer},
            sample_tags={name: str(value) for name in ("level", "subject") if (value := sample.metadata.get(name))},
        )


def own_problems(subset: str | None = None) -> list[dict[str, Any]]:
    """Returns rows of the shipped problems, of one subject or of all."""
    rows: list[dict[str, Any]] = json.loads(_OWN_PROBLEMS.read_text(encoding="utf-8"))
    return [
        row for row in rows if subset is None or row["type"].lower().replace(" ", "_").replace("&", "and") == subset
    ]


def samples_of(rows: Iterable[dict[str, Any]]) -> list[Sample]:
    """Returns rows with `COLUMNS` as samples. Rows without an answer are left out."""
    return [sample for row in rows if (sample := _sample(row)) is not None]


def _sample(row: dict[str, Any]) -> Sample | None:
    answer = row.get("answer")
    answer = extract_boxed_answer(str(row.get("solution", ""))) if answer in (None, "") else str(answer)
    problem = row.get("problem") or row.get("question")
    if not answer or not problem:
        return None
    level = str(row.get("level", ""))
    digits = "".join(character for character in level if character in "0123456789")
    return Sample(
        prompt=str(problem),
        answer=answer,
        metadata={"level": int(digits) if digits else 0, "subject": str(row.get("type") or row.get("subject") or "")},
    )
