"""The calculator agent: the model answers a question with a calculator that does one operation at a time.

The reward requires that the last answer is one number between `<answer>` tags, that it is right, and that the
calculator has returned it. A right answer without the calculator earns nothing, and neither does a call without an
answer. Countdown's grammar (digits and + - * /) parses expressions; no text is evaluated.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import Field

from telescope.environments.base import RewardResult, RolloutState, Sample, shares
from telescope.environments.calculator_agent.questions import Question, QuestionSettings, generate_questions
from telescope.environments.countdown.puzzles import ExpressionError, Portion, parse
from telescope.environments.parsers import extract_answer_tags, strip_think_tags
from telescope.environments.tool_calls import written_call
from telescope.environments.tool_env import ToolCall, ToolEnvironment, ToolResult
from telescope.errors import UserError

REQUIRED_PACKAGES: list[str] = []

DEFAULT_NUM_SAMPLES = 2_000
RESULTS_KEY = "calculator_results"
"""Key of `state.custom` with the values that the calculator has returned."""

SYSTEM_PROMPT = "You do arithmetic with a calculator. You do not compute in your head."
INSTRUCTION = (
    "Compute it from left to right, one operation after the other, whatever the operators are. The calculator does "
    "one operation at a time. When you have the result, write it alone between <answer> and </answer>."
)
CALL_OPEN, CALL_CLOSE = "<call>", "</call>"
"""The short form of a call, for very small models: `<call>12+7</call>`."""

_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")


class CalculatorAgentEnvironment(ToolEnvironment):
    """Questions such as `12+7*3`, computed from left to right.

    The model has a calculator. `prompt_style` is `full` (instructions and tool schemas, calls in the usual form) or
    `short` (the bare question, calls as `<call>12+7</call>`, results as bare numbers). `portion` is `all`, `train` or
    `heldout`: a fixed fifth of all questions is held out. The reward is 1 for a right answer that came from the
    calculator, `answer_reward` for one that is right without, else 0.
    """

    reward_min, reward_max = 0.0, 1.0
    metrics_ranges = shares("correct", "right_answer", "tool_success_rate")

    tool_role = "tool"
    tools_in_template = True

    def __init__(
        self,
        prompt_style: Literal["full", "short"] = "full",
        max_turns: int = 6,
        answer_reward: float = 0.0,
        **kwargs: Any,
    ) -> None:
        self.short = prompt_style == "short"
        kwargs.setdefault("system_prompt", None if self.short else SYSTEM_PROMPT)
        kwargs.setdefault("include_tool_schemas_in_prompt", not self.short)
        super().__init__(tools=[calculate], max_turns=max_turns, **kwargs)
        self.answer_reward = float(answer_reward)

    def load_dataset(
        self,
        num_samples: int = -1,
        portion: Portion = "all",
        seed: int = 0,
        min_operations: int = 1,
        max_operations: int = 2,
        max_number: Annotated[int, Field(ge=1, le=999)] = 20,
        operations: str = "+-*",
        **_: Any,
    ) -> list[Sample]:
        """Returns the questions. Raises `UserError` when the settings allow fewer than `num_samples`."""
        if not operations or set(operations) - set("+-*"):
            raise UserError(f"calculator_agent: operations is {operations!r}; use some of the characters + - *.")
        if not 1 <= min_operations <= max_operations <= 8:
            raise UserError(
                f"calculator_agent: min_operations is {min_operations} and max_operations {max_operations}; use 1 to "
                "8, the smaller one first."
            )
        settings = QuestionSettings(min_operations, max_operations, max_number, operations)
        wanted = DEFAULT_NUM_SAMPLES if num_samples < 0 else num_samples
        questions = list(islice(generate_questions(settings, seed, portion), wanted))
        if len(questions) < num_samples:
            raise UserError(
                f"calculator_agent: num_samples is {num_samples}, but only {len(questions)} different questions were "
                f"found with portion {portion!r} and {settings}. Lower num_samples or widen the ranges."
            )
        return [self.sample_of(question) for question in questions]

    def sample_of(self, question: Question) -> Sample:
        prompt = question.text if self.short else f"What is {question.text}?\n\n{INSTRUCTION}"
        steps = [expression for expression, _ in question.steps]
        metadata = {"question": question.text, "operations": len(steps), "steps": steps}
        return Sample(prompt, answer=str(question.answer), metadata=metadata)

    def solution(self, sample: Sample) -> list[str]:
        steps = sample.metadata["steps"]
        calls = [written_call("calculate", expression=step) for step in steps]
        if self.short:
            calls = [f"{CALL_OPEN}{step}{CALL_CLOSE}" for step in steps]
        return [*calls, f"<answer>{sample.answer}</answer>"]

    def cheats(self, sample: Sample) -> dict[str, str]:
        return super().cheats(sample) | {"answer without the calculator": f"<answer>{sample.answer}</answer>"}

    def parse_tool_calls(self, completion: str) -> list[ToolCall]:
        if not self.short:
            return super().parse_tool_calls(completion)
        text = strip_think_tags(completion)
        closed = text[: text.rfind(CALL_CLOSE) + len(CALL_CLOSE)]  # without this, many openings take quadratic time
        found = re.finditer(f"{CALL_OPEN}(.*?){CALL_CLOSE}", closed, re.DOTALL)
        calls = [ToolCall("calculate", {"expression": call[1]}, call[0]) for call in found]
        if not calls and ("<call" in text or "call>" in text):
            calls.append(ToolCall("", None, text, f"A call must have the form {CALL_OPEN}12+7{CALL_CLOSE}."))
        return calls

    def format_tool_result(self, result: ToolResult) -> str:
        if self.short and not result.success:
            return "error"
        return super().format_tool_result(result)

    def compute_reward(self, state: RolloutState, eos_token: str = "") -> RewardResult:
        last = state.trajectory[-1] if state.trajectory else None
        text = strip_think_tags(last.text) if last is not None else ""
        answer = extract_answer_tags(text)
        one_answer = text.count("<answer>") == text.count("</answer>") == 1
        final = last is not None and not last.is_truncated and state.stop_reason == "final_answer"
        number = int(answer) if _WHOLE_NUMBER.fullmatch(answer) else None
        right = final and one_answer and number is not None and number == int(state.sample.answer)
        given = right and number in state.custom.get(RESULTS_KEY, ())
        return RewardResult(
            total_reward=1.0 if given else self.answer_reward * right,
            sample_metrics={
                "correct": float(given),
                "right_answer": float(right),
                "num_turns": float(state.num_turns),
                **self.get_tool_metrics(state),
            },
            info_turns=self._turns(state, right),
            golden_answers={"answer": state.sample.answer},
            sample_tags={"operations": str(state.sample.metadata["operations"])},
        )

    def _turns(self, state: RolloutState, right: bool) -> list[dict[str, Any]]:
        """Returns per turn the expected text and whether the model wrote it.

        Other solutions also earn the full reward; these records do not affect it.
        """
        steps = state.sample.metadata["steps"]
        turns = []
        for turn, expected in enumerate(steps):
            text = state.trajectory[turn].text if turn < len(state.trajectory) else ""
            calls = [call.arguments for call in self.parse_tool_calls(text)]
            expressions = [call.get("expression") if isinstance(call, dict) else None for call in calls]
            as_expected = len(expressions) == 1 and str(expressions[0]).replace(" ", "") == expected
            turns.append({"turn": turn, "ask": expected, "correct": float(as_expected)})
        answered = right and len(state.trajectory) == len(steps) + 1
        return [*turns, {"turn": len(steps), "answer": state.sample.answer, "correct": float(answered)}]


def calculate(expression: str, state: RolloutState) -> str:
    """Compute one operation on two whole numbers.

    Args:
        expression: two numbers with + - * or / between them, such as 12*7
    """
    try:
        parsed = parse(expression)
    except ExpressionError as error:
        raise ValueError(f"the expression {error!s}") from None
    if len(parsed.numbers) != 2:
        raise ValueError("the expression must be two numbers with one operator between them")
    value: Fraction = parsed.value()
    if value.denominator == 1:
        state.custom.setdefault(RESULTS_KEY, []).append(int(value))
    return str(value)
