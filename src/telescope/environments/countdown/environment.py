"""The Countdown environment: prompts, puzzles and the reward.

An answer is right when the last `<answer>...</answer>` contains an expression that uses every given number exactly
once, with allowed operators only, and equals the target exactly. Its form is right when there is exactly one such pair
of tags, nothing follows it, and its content parses. `puzzles` parses and evaluates expressions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import Field

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment, shares
from telescope.environments.countdown.puzzles import (
    ExpressionError,
    Portion,
    PuzzleSettings,
    generate_puzzles,
    in_portion,
    parse,
    solve,
)
from telescope.environments.hub import hub_rows
from telescope.environments.parsers import answer_text, extract_answer_tags, strip_think_tags
from telescope.errors import UserError

REQUIRED_PACKAGES: list[str] = []
OPTIONAL_PACKAGES = ["datasets"]

HUB_DATASET = "Jiayi-Pan/Countdown-Tasks-3to4"

DEFAULT_NUM_GENERATED = 10_000
"""Number of generated puzzles when `num_samples` is -1."""

SYSTEM_PROMPT = "You are a careful assistant. You think about a problem first and then give the answer."
INSTRUCTION_PROMPT = (
    "Make a target from given numbers. Use every number exactly once, with the operations {operations} and "
    "parentheses. You may think first. Then write the expression alone between <answer> and </answer>, for example "
    "<answer>(1 + 2) / 3</answer>."
)

_UNSET: Any = object()
"""Distinguishes `system_prompt: null` (none) from a missing argument (the default of the prompt style)."""


class CountdownEnvironment(SingleTurnEnvironment):
    """Reach a target from given numbers.

    `dataset` is `hub`, `generated`, or `auto` (the hub's if it is available; else generated, unless `dataset_name` or
    `dataset_split` select another dataset). `portion` is `all`, `train` or `heldout`: a fixed fifth of all puzzles is
    held out, for any seed. `min_numbers` to `operations` shape generated puzzles; an answer may use `operations` only.
    `prompt_style` is `full` (instructions in words) or `short` ("3 7 12 -> 22", for very small models). The reward is
    `correct_reward` for a right answer plus `format_reward` for the right form; the metrics `correct` and `format` are
    0 or 1 whatever the weights.
    """

    metrics_ranges = shares("correct", "format")

    def __init__(
        self,
        system_prompt: str | None = _UNSET,
        instruction_prompt: str | None = _UNSET,
        prompt_style: Literal["full", "short"] = "full",
        correct_reward: float = 1.0,
        format_reward: float = 1.0,
        operations: str = "+-*/",
        **kwargs: Any,
    ) -> None:
        if not operations or set(operations) - set("+-*/"):
            raise UserError(f"countdown: operations is {operations!r}; use some of the characters + - * /.")
        full = prompt_style == "full"
        if system_prompt is _UNSET:
            system_prompt = SYSTEM_PROMPT if full else None
        if instruction_prompt is _UNSET:
            listed = ", ".join(operations)
            instruction_prompt = INSTRUCTION_PROMPT.replace("{operations}", listed) if full else None
        super().__init__(system_prompt=system_prompt, instruction_prompt=instruction_prompt, **kwargs)
        self.prompt_style = prompt_style
        self.correct_reward = float(correct_reward)
        self.format_reward = float(format_reward)
        self.operations = operations
        self.reward_min = min(0.0, self.correct_reward) + min(0.0, self.format_reward)
        self.reward_max = max(0.0, self.correct_reward) + max(0.0, self.format_reward)

    def load_dataset(
        self,
        num_samples: int = -1,
        dataset: Literal["auto", "hub", "generated"] = "auto",
        portion: Portion = "all",
        dataset_name: str = HUB_DATASET,
        dataset_subset: str | None = None,
        dataset_split: str = "train",
        seed: int = 0,
        min_numbers: Annotated[int, Field(ge=1)] = 3,
        max_numbers: int = 4,
        min_number: Annotated[int, Field(ge=0)] = 1,
        max_number: int = 99,
        min_target: int = 1,
        max_target: int = 100,
        **_: Any,
    ) -> list[Sample]:
        """Returns the puzzles as samples. Raises `UserError` when the settings allow fewer than `num_samples`."""
        settings = PuzzleSettings(
            min_numbers, max_numbers, min_number, max_number, min_target, max_target, self.operations
        )
        if dataset != "generated":
            try:
                return self._load_hub(num_samples, portion, dataset_name, dataset_subset, dataset_split)
            except Exception as error:
                # Generated puzzles replace only the default dataset, never one that the user selected.
                if dataset == "hub" or dataset_name != HUB_DATASET or dataset_split != "train":
                    raise
                reason = error.__cause__ or error
                missing = f"dataset is 'auto', and {dataset_name} is not available ({type(reason).__name__}: {reason})"
                try:
                    puzzles = self._generate(num_samples, portion, settings, seed)
                except UserError as problem:
                    raise UserError(f"{problem} Puzzles are generated because {missing}.") from error
                self.notice(
                    f"countdown: {missing}. {len(puzzles)} generated puzzles replace it. Set dataset: generated in "
                    "the kwargs to use them, or dataset: hub to refuse a run without that dataset."
                )
                return puzzles
        return self._generate(num_samples, portion, settings, seed)

    def _generate(self, num_samples: int, portion: Portion, settings: PuzzleSettings, seed: int) -> list[Sample]:
        for name in ("numbers", "number", "target"):
            low, high = getattr(settings, f"min_{name}"), getattr(settings, f"max_{name}")
            if low > high:
                raise UserError(f"countdown: min_{name} is {low}, above max_{name}, which is {high}.")
        wanted = DEFAULT_NUM_GENERATED if num_samples < 0 else num_samples
        puzzles = list(islice(generate_puzzles(settings, seed, portion), wanted))
        if len(puzzles) < num_samples:
            raise UserError(
                f"countdown: num_samples is {num_samples}, but only {len(puzzles)} different puzzles were found with "
                f"portion {portion!r} and {settings}. Lower num_samples or widen the ranges."
            )
        return [self._sample(*puzzle) for puzzle in puzzles]

    def _load_hub(
        self, num_samples: int, portion: Portion, dataset_name: str, subset: str | None, split: str
    ) -> list[Sample]:
        columns, otherwise = [("nums",), ("target",)], "or set dataset: generated"
        rows = hub_rows("countdown", dataset_name, [subset], split, columns, only=True, otherwise=otherwise)
        admitted = (row for row in rows if in_portion(row["nums"], row["target"], portion))
        chosen = islice(admitted, None if num_samples < 0 else num_samples)
        return [self._sample(tuple(row["nums"]), row["target"]) for row in chosen]

    def _sample(self, numbers: tuple[int, ...], target: int) -> Sample:
        return Sample(
            prompt=self.question(numbers, target),
            answer=str(target),
            metadata={"numbers": list(numbers), "target": target},
        )

    def question(self, numbers: Iterable[int], target: int) -> str:
        """Returns the user's message for a puzzle, without the instruction."""
        if self.prompt_style == "short":
            return f"{' '.join(map(str, numbers))} -> {target}"
        return f"Make {target} from the numbers {', '.join(map(str, numbers))}."

    def solution(self, sample: Sample) -> list[str]:
        found = solve(sample.metadata["numbers"], sample.metadata["target"], self.operations)
        return [f"<answer>{found}</answer>"] if found else []

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        text = strip_think_tags(answer_text(completion.removesuffix(eos_token))).strip()
        answer = extract_answer_tags(text)
        numbers = sample.metadata["numbers"]
        well_formed = correct = False
        with contextlib.suppress(ExpressionError, ZeroDivisionError):  # the model's mistakes, not failures
            expression = parse(answer)
            one_answer = text.count("<answer>") == text.count("</answer>") == 1
            well_formed = one_answer and text.endswith("</answer>")
            is_allowed = sorted(expression.numbers) == sorted(numbers) and expression.operators <= set(self.operations)
            correct = is_allowed and expression.value() == sample.metadata["target"]
        return RewardResult(
            total_reward=self.correct_reward * correct + self.format_reward * well_formed,
            sample_metrics={"correct": float(correct), "format": float(well_formed)},
            golden_answers={"target": sample.answer},
            sample_tags={"num_numbers": str(len(numbers))},
        )
