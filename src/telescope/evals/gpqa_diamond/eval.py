"""GPQA Diamond: 198 graduate questions of biology, chemistry and physics (https://arxiv.org/abs/2311.12022).

The hub's dataset is gated: accept its terms there and log in (`hf auth login`, or `HF_TOKEN`).
"""

import json
import random
import re
from pathlib import Path
from typing import Any, Literal

from telescope.environments.base import EvalMetricsResult, Sample, shares
from telescope.environments.hub import hub_rows, is_local
from telescope.environments.parsers import extract_boxed_answer, strip_think_tags
from telescope.evals.base import Eval

REQUIRED_PACKAGES: list[str] = []
OPTIONAL_PACKAGES = ["datasets"]

LETTERS = "ABCD"
INSTRUCTION_PROMPT_PRE = (
    "Answer the following multiple-choice question. Think step by step, and end with a line of the form "
    '"Answer: X", where X is the letter of the right choice.'
)
ANSWER_COLUMNS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
COLUMNS = tuple((name,) for name in ("Question", *ANSWER_COLUMNS))

_OWN_ITEMS = Path(__file__).parent / "items.json"
_MARKUP = r"(?:(?i:option|choice)\W{1,4})?(?:[a-z]{1,12}\{\W{0,4})?"
"""What may precede a letter: the word "option", a LaTeX command."""
_CHOICE = (
    rf"([{LETTERS}])(?![A-Za-z0-9])"
    rf"(?![^\w\n]{{0,4}}(?:[,/&]|or|and)[^\w\n]{{0,4}}{_MARKUP}[{LETTERS}](?![A-Za-z]))"  # two choices are none
)
_LEAD = r"(?:\b(?:final|correct|right|best|my|choose|pick|select)\W{1,4}|^[^\w\n]{0,12})"
_STATED = (
    re.compile(
        rf"(?i:answer\W{{0,12}}(?:[:=\uff1a]|is\b)|({_LEAD}answer))\W{{0,12}}{_MARKUP}(?P<choice>{_CHOICE})"
        # "Answer A is too small" discusses a choice
        r"(?(1)(?![^\w\n]{1,4}(?!because\b|since\b|as\b|is\W+(?:the\W+)?(?:correct|right|best)\b)[a-z]))",
        re.MULTILINE,
    ),
    re.compile(rf"(?i:answer)\W{{0,12}}{_MARKUP}(?P<choice>{_CHOICE})"),
)
"""What states a choice comes before what names one: "Answer: B", then "unlike answer A"."""
_BOXED = re.compile(rf"\W{{0,4}}(?:[a-z]+\{{)?\W{{0,4}}{_CHOICE}(?:[).:}}\s].*)?", re.DOTALL)


class GpqaDiamond(Eval):
    """Questions with four choices.

    Their order depends on `shuffle_seed` and the question alone. `dataset` is `hub`, or `own` for the few items that
    ship with Telescope, whose accuracy is not the benchmark's. `instruction_prompt_pre` precedes a question.
    """

    metrics_ranges = shares("correct", "answered")

    def load_dataset(
        self,
        num_samples: int = -1,
        dataset: Literal["hub", "own"] = "hub",
        dataset_name: str = "Idavidrein/gpqa",
        dataset_subset: str | None = "gpqa_diamond",
        dataset_split: str = "train",
        shuffle_seed: int = 0,
        instruction_prompt_pre: str | None = INSTRUCTION_PROMPT_PRE,
        **_: Any,
    ) -> list[Sample]:
        """Returns the questions as samples. A sample's answer is a letter."""
        if dataset == "own":
            rows = json.loads(_OWN_ITEMS.read_text(encoding="utf-8"))
        else:
            subset = None if is_local(dataset_name) else dataset_subset
            rows = list(hub_rows(self.name, dataset_name, [subset], dataset_split, COLUMNS))
        samples = [_sample(row, shuffle_seed, instruction_prompt_pre) for row in rows]
        return samples if num_samples < 0 else samples[:num_samples]

    def compute_eval_metrics(self, completion: str, sample: Sample, eos_token: str = "") -> EvalMetricsResult:
        letter = extract_choice(strip_think_tags(completion.removesuffix(eos_token)))
        return EvalMetricsResult(
            metrics={"correct": float(letter == sample.answer), "answered": float(letter != "")},
            golden_answers={"answer": sample.answer},
        )


def extract_choice(text: str) -> str:
    r"""Returns the chosen letter, or `""`. It is in the last `\boxed{B}`, or else after the last "Answer:"."""
    boxed = _BOXED.fullmatch(extract_boxed_answer(text))
    if boxed is not None:
        return boxed[1]
    stated = next(filter(None, (list(pattern.finditer(text)) for pattern in _STATED)), None)
    return stated[-1]["choice"][0] if stated else ""


def _sample(row: dict[str, Any], shuffle_seed: int, instruction: str | None) -> Sample:
    question = str(row["Question"]).strip()
    order = list(ANSWER_COLUMNS)
    random.Random(f"{shuffle_seed} {question}").shuffle(order)
    choices = [f"{letter}) {str(row[column]).strip()}" for letter, column in zip(LETTERS, order, strict=True)]
    prompt = f"{question}\n\n" + "\n".join(choices)
    return Sample(
        prompt=f"{instruction.rstrip()}\n\n{prompt}" if instruction else prompt,
        answer=LETTERS[order.index("Correct Answer")],
    )
