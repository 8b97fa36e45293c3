"""The Countdown environment: prompts, puzzles and the reward.

An answer is right when the last `<answer>...</answer>` contains an expression that uses every given number exactly
once, with allowed operators only, and equals the target exactly. Its form is right when there is exactly one such pair
of tags, nothing follows it, and its content parses. `puzzles` parses and evaluates expressions.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment, shares
from telescope.environments.countdown.puzzles import (
    Expression,
    ExpressionError,
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
        prompt_style: str = "full",
        correct_reward: float = 1.0,
        format_reward: float = 1.0,
        operations: str = "+-*/",
        **kwargs: Any,
    ) -> None:
        _one_of("prompt_style", prompt_style, ("full", "short"))
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
        dataset: str = "auto",
        portion: str = "all",
        dataset_name: str = HUB_DATASET,
        dataset_subset: str | None = None,
        dataset_split: str = "train",
        seed: int = 0,
        min_numbers: int = 3,
        max_numbers: int = 4,
        min_number: int = 1,
        max_number: int = 99,
        min_target: int = 1,
        max_target: int = 100,
        **_: Any,
    ) -> list[Sample]:
        """Returns the puzzles as samples. Raises `UserError` when the settings allow fewer than `num_samples`."""
        _one_of("dataset", dataset, ("auto", "hub", "generated"))
        _one_of("portion", portion, ("all", "train", "heldout"))
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

    def _generate(self, num_samples: int, portion: str, settings: PuzzleSettings, seed: int) -> list[Sample]:
        for name in ("numbers", "number", "target"):
            low, high = getattr(settings, f"min_{name}"), getattr(settings, f"max_{name}")
            if low > high:
                raise UserError(f"countdown: min_{name} is {low}, above max_{name}, which is {high}.")
        if settings.min_numbers < 1:
            raise UserError(f"countdown: min_numbers is {settings.min_numbers}; use 1 or more.")
        if settings.min_number < 0:
            raise UserError(f"countdown: min_number is {settings.min_number}; numbers are not negative, use 0 or more.")
        wanted = DEFAULT_NUM_GENERATED if num_samples < 0 else num_samples
        puzzles = list(islice(generate_puzzles(settings, seed, portion), wanted))
        if len(puzzles) < num_samples:
            raise UserError(
                f"countdown: num_samples is {num_samples}, but only {len(puzzles)} different puzzles were found with "
                f"portion {portion!r} and {settings}. Lower num_samples or widen the ranges."
            )
        return [self._sample(puzzle.numbers, puzzle.target) for puzzle in puzzles]

    def _load_hub(
        self, num_samples: int, portion: str, dataset_name: str, subset: str | None, split: str
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
        try:
            expression = parse(answer)
        except ExpressionError:
            expression = None  # the model's mistake, not a failure
        one_answer_at_the_end = text.endswith("</answer>") and text.count("<answer>") == text.count("</answer>") == 1
        well_formed = expression is not None and one_answer_at_the_end
        numbers = sample.metadata["numbers"]
        correct = expression is not None and self._reaches(expression, numbers, sample.metadata["target"])
        return RewardResult(
            total_reward=self.correct_reward * correct + self.format_reward * well_formed,
            sample_metrics={"correct": float(correct), "format": float(well_formed)},
            golden_answers={"target": sample.answer},
            sample_tags={"num_numbers": str(len(numbers))},
        )

    def _reaches(self, expression: Expression, numbers: list[int], target: int) -> bool:
        if sorted(expression.numbers) != sorted(numbers) or expression.operators - set(self.operations):
            return False
        try:
            return expression.value() == target
        except ZeroDivisionError:
            return False  # the model's mistake, not a failure


def _one_of(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"countdown: {field} is {value!r}; use one of {', '.join(choices)}.")
