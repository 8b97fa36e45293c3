"""Trains on your own rows, without code: a file, a folder or a dataset of the hub.

Rows of verl, GSM8K, MATH and TRL are recognized; for other rows the arguments name the columns. The reward compares the
answer in a completion with the row's answer, or is a function with the signature of TRL's reward functions.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar, Literal

from telescope.environments import math_problems
from telescope.environments.arguments import known_arguments, refuse_unknown
from telescope.environments.base import GOLD, ChatMessage, Environment, RewardResult, Sample, shares
from telescope.environments.dataset.rewards import call_function, read_reward, read_terms, refuse_missing_columns
from telescope.environments.dataset.rows import (
    GSM8K,
    choose_columns,
    read_assertions,
    read_criteria,
    read_row,
    value_of,
)
from telescope.environments.hub import hub_rows
from telescope.environments.i3_code.environment import INSTRUCTION_PROMPT as CODE_PROMPT
from telescope.environments.i3_code.environment import I3CodeEnvironment, read_tests
from telescope.environments.parsers import (
    extract_answer_tags,
    extract_stated_answer,
    strip_think_tags,
    verify_exact_match,
)
from telescope.environments.records import GoldCheck
from telescope.environments.registry import make_environment
from telescope.environments.user_code import load_function, maybe_await
from telescope.errors import MalformedResultError, UserError
from telescope.utils.text import did_you_mean, is_misspelled, pluralize

REQUIRED_PACKAGES: list[str] = []
OPTIONAL_PACKAGES = ["datasets", "math-verify"]

TAGS_PROMPT = "Think step by step, and put your final answer between <answer> and </answer>."
_INSTRUCTIONS = {"math": math_problems.INSTRUCTION_PROMPT, "exact": TAGS_PROMPT, "code": CODE_PROMPT}
_ASKS_FOR_A_FORM = re.compile(r"boxed|fbox|####|<answer>|answer\W{0,4}:|```", re.IGNORECASE)
_TESTS_KEY = "_tests"
"""Key of a sample's metadata with the tests of `reward: code`."""
_RUN_TEST = "\n\ndef _run_test(test, code):\n    exec(test, globals())\n    return code\n"
"""Follows the program in an answer if its row's tests are assertions."""
_UNSET: Any = object()


class DatasetEnvironment(math_problems.MathEnvironment):
    """Rows of a file, a folder or the hub, with a reward by name.

    `path` is a file (JSON, JSON lines, Parquet, CSV), a folder of them, or a dataset of the hub, with its `subset` and
    `split`. `prompt` and `answer` name columns, if they are not recognized; a dot leads into a column
    (`reward_model.ground_truth`). `reward` is `math` (equal by math-verify), `exact` (the same text), `regex` (the last
    match of `pattern`, or its first group that matched, is the same text; without answers, it matches), `judge` (the
    share of `criteria` that the model of the argument `judge` finds met: a text, weights, or a column of them), `code`
    (the program in the answer passes the row's `tests`; the argument `code` has arguments of `i3_code`), or
    `package.module:function` or `file.py:function` with TRL's signature; of a list, the sum counts, and a mapping gives
    each a weight. `rollout` names an async function of a sample and a context that replaces the turn loop. It returns
    the answer to score, or a `RewardResult`.
    `instruction_prompt` precedes the user's message; by default it asks for the form of the answer unless the first
    prompt does.
    """

    metrics_ranges = shares("correct", "format", "judge", "code")
    resources_per: ClassVar[Literal["host", "process"]] = "process"
    answered_metric = "format"

    def __init__(
        self,
        reward: str | list[str] | dict[str, float] = "math",
        pattern: str | None = None,
        instruction_prompt: str | None = _UNSET,
        criteria: str | dict[str, float] | None = None,
        code: dict[str, Any] | None = None,
        rollout: str | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_unknown(kwargs, known_arguments(type(self), Environment), "The environment 'dataset'")
        self.terms = terms = read_terms(reward, pattern=pattern, criteria=criteria, code=code)
        try:
            self.pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise UserError(f"dataset: pattern {pattern!r} is not a regular expression: {error}.") from error
        self.criteria = criteria or "The answer is correct."
        self._criteria_column: str | None = None
        self._code: I3CodeEnvironment | None = None
        if terms.runs_tests:
            tested = make_environment(I3CodeEnvironment, "dataset: code", code or {})
            assert isinstance(tested, I3CodeEnvironment)
            self._code = tested
        self._instruction_is_default = instruction_prompt is _UNSET
        if self._instruction_is_default:
            instruction_prompt = _INSTRUCTIONS.get("code" if terms.runs_tests else terms.compares or "")
        super().__init__(instruction_prompt=instruction_prompt, **kwargs)
        if terms.judges and (self.judge is None or (self.judge.is_policy and rollout is None)):
            raise UserError(
                "dataset: reward: judge needs judge: {url: ..., model: ...} in its kwargs; url: policy needs a rollout."
            )
        if self.judge is not None and not terms.judges and rollout is None:
            raise UserError(
                f"dataset: judge belongs to reward: judge, and reward is {reward!r}. Add it, or leave it out."
            )
        if terms.functions or len(terms.weights) > 1 or isinstance(reward, dict):
            self.reward_min = self.reward_max = None
        if rollout is not None:
            self._rollout = load_function(rollout, "dataset: the rollout")
            if not inspect.iscoroutinefunction(self._rollout):
                raise UserError(f"dataset: the rollout {rollout!r} is no async function of a sample and a context.")
            vars(self)["rollout"] = self._roll_out  # for other environments it is a method of the class

    async def check_resources(self) -> None:
        await super().check_resources()
        if self._code is not None:
            await self._code.check_resources()

    async def prepare_resources(self) -> None:
        if self._code is not None:
            await self._code.prepare_resources()

    async def close_resources(self) -> None:
        await super().close_resources()
        if self._code is not None:
            await self._code.close_resources()

    def load_dataset(  # type: ignore[override]  # takes no others, so that misspelled ones are refused
        self,
        num_samples: int = -1,
        path: str | None = None,
        subset: str | None = None,
        split: str | None = None,
        prompt: str | list[str] | None = None,
        answer: str | None = None,
        tests: str | None = None,
        seed: int | None = None,
    ) -> list[Sample]:
        """Returns the rows as samples, with all columns in their metadata. Raises `UserError` if there are none."""
        if not path:
            raise UserError("dataset: set path in its kwargs to a file, a folder or a dataset of the hub.")
        rows = list(hub_rows("dataset", path, [subset], split or "train", (), otherwise=""))
        if not rows:
            raise UserError(f"dataset: {path} (split {split or 'train'!r}) is empty. Give a dataset with rows.")
        columns = list(dict.fromkeys(column for row in rows for column in row))  # rows of JSON lines may differ
        needs = {"needs_answer": self.terms.needs_answer, "needs_tests": self._code is not None}
        form, prompts, answer, tests = choose_columns(path, rows, columns, prompt, answer, tests=tests, **needs)
        for name, function in self.terms.functions.items():
            refuse_missing_columns(name, function, path, columns)
        criteria = self.criteria if self.terms.judges and isinstance(self.criteria, str) else ""
        if criteria.partition(".")[0] in columns:
            self._criteria_column = criteria
        elif is_misspelled(criteria, columns):
            raise UserError(f"dataset: criteria is {criteria!r}.{did_you_mean(criteria, columns)}")
        # A text that is compared unchanged may contain "####" or "answer:" without being a worked-out solution.
        is_final = self.terms.compares != "math" and form != GSM8K
        samples: list[Sample] = []
        unusable: list[str] = []
        without_choice: list[str] = []
        columns_used = f"prompt in {', '.join(map(repr, prompts))}, " + (
            f"answer in {answer!r}" if answer else "no column of answers"
        )
        for number, row in enumerate(rows):
            try:
                messages, gold, lacks_choice = read_row(row, prompts, answer)
                golds = math_problems.read_golds(gold, is_final=is_final)
                if self.terms.judges:
                    self._criteria_of(row)
                messages, read = self._read_tests(row, tests, number, messages)
                row = dict.fromkeys(columns) | row | read  # a function gets null for a column that the row lacks
            except (ValueError, UserError) as error:
                unusable.append(f"row {number} ({columns_used}): {error}")
                continue
            sample = math_problems.make_sample(messages, golds if golds or self.terms.needs_answer else [""], row)
            if sample is not None:
                samples.append(sample)
                if lacks_choice and golds:
                    without_choice.append(f"row {number} ({gold!r:.40})")
        if 2 * len(unusable) > len(rows):
            raise UserError(
                f"dataset: {path}: {len(unusable)} of {len(rows)} rows cannot be used, such as {unusable[0]}."
            )
        if self._instruction_is_default and samples and _ASKS_FOR_A_FORM.search(str(samples[0].prompt)):
            self.instruction_prompt = None
        if self.terms.judges:
            columns_used += f", criteria {'in ' if self._criteria_column else ''}{self.criteria!r}"
        columns_used += f", reward {self.terms}."
        used = {name.partition(".")[0] for name in (*prompts, answer, tests, self._criteria_column) if name}
        if others := [column for column in columns if column not in used]:
            columns_used += f" Other columns: {', '.join(others)}."
        if num_empty := len(rows) - len(samples) - len(unusable):
            columns_used += f" Left out without a prompt or an answer: {pluralize(num_empty, 'row')}."
        if without_choice:
            num, first = pluralize(len(without_choice), "row"), without_choice[0]
            columns_used += f" The answer of {num} is none of the row's choices, and kept as it is: {first} is one."
        if unusable:
            columns_used += f" Left out as unusable: {pluralize(len(unusable), 'row')}, such as {unusable[0]}."
        self.notice(f"dataset: {path} has {form}: {pluralize(len(samples), 'item')}, {columns_used}")
        return self.select_samples(samples, num_samples, seed, path)

    def _criteria_of(self, row: dict[str, Any]) -> dict[str, float]:
        return read_criteria(value_of(row, self._criteria_column) if self._criteria_column else self.criteria)

    def _read_tests(self, row: dict[str, Any], column: str | None, number: int, prompt: Any) -> tuple[Any, Any]:
        """Returns the prompt, which says how the answer is tested, and the row's tests as metadata."""
        if self._code is None or column is None:
            return prompt, {}
        tests, rng = value_of(row, column), random.Random(number)
        assertions, head, prompt = read_assertions(row, tests, prompt) or (None, "", prompt)
        if assertions:  # a test that passes returns a text that the answer does not know
            codes = [rng.randbytes(16).hex() for _ in assertions]
            tests = {"inputs": list(zip(assertions, codes, strict=True)), "outputs": codes, "fn_name": "_run_test"}
        most = (self._code._load_arguments or {}).get("max_num_tests", 15)
        around = {"before": head, "after": _RUN_TEST} if assertions else {}
        return prompt, {_TESTS_KEY: read_tests(tests, most, rng) | around}

    async def _run_tests(self, text: str, sample: Sample, result: RewardResult) -> float:
        """Returns 1 if the program in an answer passes its row's tests, else 0. Adds the tests' metrics and notes."""
        assert self._code is not None
        tested = await self._code.compute_reward(text, Sample("", metadata={"tests": sample.metadata[_TESTS_KEY]}))
        result.sample_metrics |= tested.sample_metrics
        result.info_turns += tested.info_turns
        return tested.total_reward

    async def _roll_out(self, sample: Sample, context: Any) -> RewardResult:
        result = await self._rollout(sample, context)
        if isinstance(result, str):
            return await maybe_await(self.compute_reward(result, sample))
        if not isinstance(result, RewardResult):
            raise MalformedResultError(
                f"the rollout returned {result!r:.80}, not the answer (a text) or a RewardResult"
            )
        return result

    def build_messages(self, question: str | Sequence[ChatMessage]) -> list[ChatMessage]:
        messages = super().build_messages(question)
        if not isinstance(question, str) and self.instruction_prompt:
            last = next((message for message in reversed(messages) if message.get("role") == "user"), None)
            if last is not None and isinstance(last["content"], str):
                last["content"] = f"{self.instruction_prompt}\n\n{last['content']}"
        return messages

    def extract_answer(self, text: str) -> str:
        if self.pattern is not None:
            matches = list(self.pattern.finditer(text))
            if not matches or not self.pattern.groups:
                return matches[-1][0].strip() if matches else ""
            return next((group.strip() for group in matches[-1].groups() if group is not None), "")
        return (extract_answer_tags(text) if self.terms.compares == "exact" else "") or extract_stated_answer(text)

    def is_correct(self, answer: str, sample: Sample) -> bool:
        if self.terms.compares == "math":
            return super().is_correct(answer, sample)
        golds = math_problems.stored_golds(sample)
        return any(_is_same(answer, gold) for gold in golds) or (self.terms.compares == "regex" and not golds)

    def check_gold(self, sample: Sample) -> GoldCheck | None:
        if self.terms.compares == "math":
            return super().check_gold(sample)
        if self.terms.compares != "exact":
            return GoldCheck(sample.answer)
        written = self.extract_answer(f"<answer>{sample.answer}</answer>")
        return GoldCheck(written, None if self.is_correct(written, sample) else "an extracted answer differs from it")

    def solution(self, sample: Sample) -> list[str]:
        row = sample.metadata  # the answer lacks the indentation of HumanEval's solutions
        program = self._code is not None and (row.get("solution") or row.get("canonical_solution") or sample.answer)
        return [f"```python\n{program}\n```"] if program else []

    def cheats(self, sample: Sample) -> dict[str, str]:
        cheats = super().cheats(sample)
        if self.terms.compares != "math" or len(self.terms.functions) + self.terms.judges:
            cheats.pop(GOLD, None)  # a right answer in any form
        return cheats if self._code is None else self._code.cheats(Sample("")) | cheats

    def compute_reward(  # type: ignore[override]  # awaitable with async functions
        self, completion: str, sample: Sample, eos_token: str = ""
    ) -> RewardResult | Awaitable[RewardResult]:
        text = completion.removesuffix(eos_token)
        result = RewardResult(0.0)
        if self.terms.compares:
            result = super().compute_reward(completion, sample, eos_token)
            # Without a form, the whole completion is the answer.
            if self.terms.compares == "exact" and not result.sample_metrics["format"]:
                correct = float(self.is_correct(strip_think_tags(text), sample))
                result.total_reward = result.sample_metrics["correct"] = correct
        if isinstance(source := sample.metadata.get("data_source"), str):
            result.sample_tags["data_source"] = source
        metrics = result.sample_metrics
        returned = {name: call_function(called, text, sample, metrics) for name, called in self.terms.functions.items()}
        if self.judge is not None and self.terms.judges:
            criteria = self._criteria_of(sample.metadata)
            returned["judge"] = self.judge.score(sample.prompt, text, reference=sample.answer, criteria=criteria)
        if self._code is not None:
            returned["code"] = self._run_tests(text, sample, result)
        if not any(map(inspect.isawaitable, returned.values())):
            return self._add(result, returned)

        async def add_later() -> RewardResult:
            return self._add(result, {name: await maybe_await(value) for name, value in returned.items()})

        return add_later()

    def _add(self, result: RewardResult, returned: dict[str, Any]) -> RewardResult:
        values = {name: read_reward(name, self.terms.functions.get(name), value) for name, value in returned.items()}
        result.sample_metrics |= values
        result.total_reward = self.terms.total({"correct": result.total_reward} | values)
        return result


def _is_same(answer: str, gold: str) -> bool:
    """Compares texts, ignoring spaces, and the case of logic words."""
    if gold.casefold() in ("true", "false", "yes", "no"):
        answer, gold = answer.casefold(), gold.casefold()
    return verify_exact_match(answer, gold)
