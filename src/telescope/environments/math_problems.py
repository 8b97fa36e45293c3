"""Base of the mathematical environments: prompts, scoring, and shipped problems.

`hendrycks_math`, `dapo_math`, `deepscaler` and the evals of `telescope.evals.math_benchmark` use it.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from telescope.environments.base import ChatMessage, RewardResult, Sample, SingleTurnEnvironment, shares
from telescope.environments.hendrycks_math.worked_out import is_worked_out
from telescope.environments.hub import hub_rows
from telescope.environments.math_notation import MAX_CHARACTERS, normalize_answer
from telescope.environments.math_verifier import read_expression
from telescope.environments.parsers import (
    extract_boxed_answer,
    extract_stated_answer,
    strip_think_tags,
    verify_math_answer,
)
from telescope.environments.records import GoldCheck
from telescope.errors import UserError

COLUMNS = (("problem", "question"), ("answer", "solution"))
"""Columns of a dataset of problems. Without an answer, it is the last box of the solution."""

INSTRUCTION_PROMPT = "Think step by step, and put your final answer within \\boxed{}."
_OWN_PROBLEMS = Path(__file__).parent / "hendrycks_math" / "problems.json"

ANSWERS_KEY = "_answers"
"""Key of a sample's metadata with all its answers, if there are several."""
NO_ANSWERS = ("proof", "notfound")
"""What the column `answer` of NuminaMath has where a problem asks for a proof. A model would learn to write it."""
MAX_WORDS = 5
"""Most words of a final answer, such as "all real numbers except 1". No model repeats a sentence word by word."""
_ASIAN = "\u3040-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"(?<![\\A-Za-z])[^\W\d_{_ASIAN}]{{2,}}|[{_ASIAN}]{{1,4}}")
"""A word. Chinese and Japanese have no spaces between words."""
_TEXT = re.compile(r"[^\W\d_]{2,}(?: [^\W\d_]+)*")

_UNREADABLE = (
    (re.compile(r"[{\[]\s*(['\"])\w+\1\s*:.*", re.S), "it is a record; name the field with the answer"),
    (re.compile(r".*(?<!\\)\$.*", re.S), "it is text around a formula"),
    (re.compile(r".*(?<![\\A-Za-z{])[A-Za-z]{2,}\s*:[^A-Za-z]*[0-9].*", re.S), "it has a label"),
    (re.compile(r"[^A-Za-z\\]*[0-9]\s*=\s*[-0-9][^A-Za-z\\]*"), "it is a calculation; give its result"),
    (re.compile(r"\D*[A-Za-z]{2}\D*[0-9].*[A-Za-z]{2}.*", re.S), "it is a sentence, not a final answer"),
)
"""Golds of which math-verify reads the letters of words as factors, or no single value."""


class MathEnvironment(SingleTurnEnvironment):
    """Competition problems with one answer each, from the dataset `hub_dataset`.

    `dataset` is `hub`, or `own` for a few dozen shipped problems. `dataset_name` selects another dataset of the hub, or
    a local file. `seed` shuffles the order; without it, the order is the dataset's. `instruction_prompt` precedes a
    problem, `instruction_prompt_post` follows it. `verify_timeout_seconds` limits one comparison.
    """

    hub_dataset: ClassVar[str]
    hub_subsets: ClassVar[tuple[str | None, ...]] = (None,)
    """Subsets of `hub_dataset` that are read without `dataset_subset`."""
    reward_min: float | None = 0.0
    reward_max: float | None = 1.0
    metrics_ranges = shares("correct", "boxed")
    answered_metric: ClassVar[str] = "boxed"
    """Metric that is 1 when `extract_answer` finds an answer."""

    def __init__(
        self,
        instruction_prompt: str | None = INSTRUCTION_PROMPT,
        instruction_prompt_post: str | None = None,
        verify_timeout_seconds: float = 5.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(instruction_prompt=instruction_prompt, **kwargs)
        self.instruction_prompt_post = instruction_prompt_post
        self.verify_timeout_seconds = float(verify_timeout_seconds)

    def load_dataset(
        self,
        num_samples: int = -1,
        dataset: Literal["hub", "own", "auto"] = "hub",  # auto is the older name of hub
        dataset_name: str | None = None,
        dataset_subset: str | None = None,
        dataset_split: str = "train",
        seed: int | None = None,
        **_: Any,
    ) -> list[Sample]:
        """Returns the problems as samples. Raises `UserError` if there are none."""
        name = "dataset: own" if dataset == "own" else dataset_name or self.hub_dataset
        if dataset == "own":
            samples = self.own_samples(dataset_subset)
        else:
            subsets = self.hub_subsets if dataset_subset is None and name == self.hub_dataset else (dataset_subset,)
            samples = self.hub_samples(name, subsets, dataset_split)
        return self.select_samples(samples, num_samples, seed, f"{name} (dataset_subset {dataset_subset!r})")

    def hub_samples(self, name: str, subsets: Sequence[str | None], split: str) -> list[Sample]:
        """Returns the problems of a hub dataset."""
        return samples_of(hub_rows(self.name, name, subsets, split, COLUMNS))

    def own_samples(self, subset: str | None) -> list[Sample]:
        """Returns the problems that ship with Telescope."""
        return samples_of(own_problems(subset))

    def select_samples(self, samples: list[Sample], num_samples: int, seed: int | None, source: str) -> list[Sample]:
        """Returns the first `num_samples`, shuffled by `seed` if given. Raises `UserError` if there are none."""
        if not samples:
            raise UserError(f"{self.name}: there is no problem with an answer in {source}.")
        if seed is not None:
            random.Random(f"hendrycks_math {seed}").shuffle(samples)
        return samples if num_samples < 0 else samples[:num_samples]

    def build_messages(self, question: str | Sequence[ChatMessage]) -> list[ChatMessage]:
        if isinstance(question, str) and self.instruction_prompt_post:
            question = f"{question.rstrip()}\n\n{self.instruction_prompt_post.lstrip()}"
        return super().build_messages(question)

    def extract_answer(self, text: str) -> str:
        """Returns the final answer in a completion, ignoring reasoning, or `""`."""
        return extract_boxed_answer(text)

    def is_correct(self, answer: str, sample: Sample) -> bool:
        """Returns whether the answer equals one of the sample's answers, and does not repeat the problem."""
        prompt = sample.prompt
        problem = prompt if isinstance(prompt, str) else "\n".join(str(message.get("content")) for message in prompt)
        return any(
            is_worked_out(answer, gold, problem) and verify_math_answer(answer, gold, self.verify_timeout_seconds)
            for gold in golds_of(sample)
        )

    def check_gold(self, sample: Sample) -> GoldCheck | None:
        """Returns how math-verify reads the sample's answer. If there are several, one readable answer is enough."""
        checks = []
        for gold in golds_of(sample):
            if len(gold) > MAX_CHARACTERS:
                checks.append(GoldCheck("", f"it is longer than {MAX_CHARACTERS} characters"))
                continue
            normalized = normalize_answer(gold)
            words = _WORD.findall(normalized)
            texts = [gold, *[normalized] * 3, normalized if len(words) > 2 else ""]
            found = [reason for (form, reason), text in zip(_UNREADABLE, texts, strict=True) if form.fullmatch(text)]
            if found or len(words) > MAX_WORDS:
                checks.append(GoldCheck("", (*found, "it is a sentence, not a final answer")[0]))
                continue
            is_text = _TEXT.fullmatch(normalized)  # of which math-verify reads the product of its letters
            parsed = normalized if is_text else read_expression(gold, self.verify_timeout_seconds)
            checks.append(GoldCheck(parsed or gold, None if parsed or words else "math-verify cannot read it"))
        checks.append(GoldCheck("", "it is empty"))
        return next((check for check in checks if not check.problem), checks[0])

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        answer = self.extract_answer(strip_think_tags(completion.removesuffix(eos_token)))
        correct = answer != "" and self.is_correct(answer, sample)
        return RewardResult(
            total_reward=float(correct),
            sample_metrics={"correct": float(correct), self.answered_metric: float(answer != "")},
            golden_answers={"answer": sample.answer},
            sample_tags={name: str(value) for name in ("level", "subject") if (value := sample.metadata.get(name))},
        )


def own_problems(subset: str | None = None) -> list[dict[str, Any]]:
    """Returns the rows of the shipped problems, for one subject or all."""
    rows: list[dict[str, Any]] = json.loads(_OWN_PROBLEMS.read_text(encoding="utf-8"))
    return [
        row for row in rows if subset is None or row["type"].lower().replace(" ", "_").replace("&", "and") == subset
    ]


def samples_of(rows: Iterable[dict[str, Any]]) -> list[Sample]:
    """Returns rows with `COLUMNS` as samples. Skips rows without an answer."""
    samples = []
    for row in rows:
        golds = read_golds(row.get("answer")) or read_golds(extract_stated_answer(str(row.get("solution", ""))))
        digits = re.sub(r"[^0-9]", "", str(row.get("level", "")))
        metadata = {"level": int(digits or 0), "subject": str(row.get("type") or row.get("subject") or "")}
        samples.append(make_sample(row.get("problem") or row.get("question"), golds, metadata))
    return [sample for sample in samples if sample is not None]


def make_sample(prompt: Any, golds: list[str], metadata: dict[str, Any]) -> Sample | None:
    """Returns an item whose prompt is text or messages. None if the prompt or the gold is missing."""
    if not prompt or not golds:
        return None
    if not isinstance(prompt, list):
        prompt = prompt.decode() if isinstance(prompt, bytes) else str(prompt)
    return Sample(prompt, answer=golds[0], metadata=metadata | ({ANSWERS_KEY: golds} if len(golds) > 1 else {}))


def golds_of(sample: Sample) -> list[str]:
    """Returns the final answers of a sample. Any of them is right."""
    return read_golds(stored_golds(sample))


def stored_golds(sample: Sample) -> list[str]:
    """Returns the answers of a sample as they are stored. Empty if there are none."""
    return sample.metadata.get(ANSWERS_KEY) or [sample.answer] * bool(sample.answer)


def read_golds(value: Any, *, is_final: bool = False) -> list[str]:
    """Returns the final answers in a gold, any of which is right. Empty if there are none.

    A gold is a text (see `extract_stated_answer`), a number, true or false, or a list of these, also written as JSON.
    With `is_final`, a text is used unchanged. Raises `UserError` for an object, `ValueError` for broken UTF-8.
    """
    if isinstance(value, list | tuple):
        return [gold for item in value for gold in read_golds(item, is_final=is_final)]
    if isinstance(value, dict):
        raise UserError(f"The answer {value!r} has fields. Name one, as in answer: column.{next(iter(value), 'field')}")
    if isinstance(value, bool):
        return [str(value).lower()]
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = "" if value is None or value != value else str(value).strip()
    if is_final:
        return [text] if text else []
    if text.lower() in NO_ANSWERS:
        return []
    if text.startswith('["') and text.endswith('"]'):
        with contextlib.suppress(ValueError):
            return read_golds(json.loads(text))
    return [extract_stated_answer(text) or text] if text else []
