"""Prompts and answers of the generated run: arithmetic with right and wrong solutions, written out step by step.

Three tasks, named as environments: `countdown` (reach a target with given numbers), `algebra` (equations and
percentages, with LaTeX) and `calculator_agent` (a tool, several turns). All answers of a problem are made once; a
sample chooses one of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from telescope.environments.calculator_agent.questions import Question, QuestionSettings, draw_question

NUM_PROBLEMS = 96
"""Problems of each task."""

NUM_RIGHT, NUM_WRONG = 5, 7
"""Different answers of each problem."""

EOS = "<|im_end|>"


@dataclass(slots=True)
class Part:
    """One answer of the model, and the environment's words before it."""

    text: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    replies: list[tuple[str, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """All turns of a sample, and its score."""

    parts: list[Part]
    correct: bool
    has_format: bool = True
    finish_reason: str = "stop"
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Problem:
    """A prompt with its answers. `difficulty` is from 0 to 1."""

    task: str
    index: int
    system: str
    question: str
    golden: dict[str, str | None]
    tags: dict[str, str]
    difficulty: float
    right: list[Answer]
    wrong: list[Answer]
    looping: Answer
    """An answer that repeats itself until it is cut off."""

    @property
    def prompt(self) -> str:
        """The prompt with the tokens of the chat template."""
        return (
            f"<|im_start|>system\n{self.system}{EOS}\n<|im_start|>user\n{self.question}{EOS}\n<|im_start|>assistant\n"
        )


def make_problems(task: str, seed: int) -> list[Problem]:
    """Returns the problems of a task, the same for the same seed."""
    chosen = random.Random(f"{task} {seed}")
    return [MAKERS[task](chosen, index) for index in range(NUM_PROBLEMS)]


def _problem(
    task: str, index: int, chosen: random.Random, system: str, question: str, golden: str, level: int,
    right: Callable[[random.Random], Answer], wrong: Callable[[random.Random], Answer],
) -> Problem:  # fmt: skip
    most = max(level for level, _ in LEVELS[task])
    return Problem(
        task, index, system, question, {"answer": golden}, {"level": str(level)},
        min(1.0, max(0.0, level / most * 0.75 + chosen.uniform(-0.15, 0.25))),
        [right(chosen) for _ in range(NUM_RIGHT)], [wrong(chosen) for _ in range(NUM_WRONG)],
        looping(chosen, wrong(chosen)),
    )  # fmt: skip


def looping(chosen: random.Random, answer: Answer) -> Answer:
    """Returns an answer whose last part is cut off in a loop."""
    line = chosen.choice(("Wait, let me check this again. ", "Hmm, that is not right. Let me try again. "))
    *before, last = answer.parts
    text = f"{last.text.partition('</think>')[0]}\n{line * chosen.randint(18, 30)}"
    metrics = dict.fromkeys(answer.metrics, 0.0)
    return Answer([*before, Part(text.rstrip(), replies=last.replies)], False, False, "length", metrics)


# Countdown

COUNTDOWN = (
    "You think about a problem first, between <think> and </think>. Then you write an expression that uses every "
    "number exactly once between <answer> and </answer>."
)
FIRST_WORDS = (
    "I need {target} from {numbers}.",
    "The target is {target}, and I have {numbers}.",
    "Numbers: {numbers}. Goal: {target}.",
)
DEAD_ENDS = ("That is {off} {side}.", "Too {size}, off by {off}.", "Not it, {off} {side}.")


def countdown(chosen: random.Random, index: int) -> Problem:
    """A puzzle that is solvable from left to right."""
    level = _level("countdown", chosen)
    puzzle = _question(level, chosen)
    numbers, target, expression = puzzle.numbers, puzzle.answer, _expression(puzzle)
    listed = ", ".join(map(str, chosen.sample(numbers, len(numbers))))

    def guessed(rng: random.Random, count: int, signs: str) -> Question:
        return Question(tuple(rng.sample(numbers, count)), tuple(rng.choices(signs, k=count - 1)))

    def thoughts(rng: random.Random, attempts: int) -> list[str]:
        lines = [rng.choice(FIRST_WORDS).format(target=target, numbers=listed)]
        for _ in range(attempts):
            tried = guessed(rng, len(numbers), "++--*")
            off = abs(tried.answer - target)
            side, size = ("above", "large") if tried.answer > target else ("below", "small")
            end = rng.choice(DEAD_ENDS).format(off=off, side=side, size=size) if off else "But a number is left."
            lines.append(f"Try {', '.join(_spoken(tried))}. {end}")
        return lines

    def right(rng: random.Random) -> Answer:
        lines = thoughts(rng, rng.choice((0, 1, 1, 2, 3)))
        lines.append(f"{rng.choice(('Now', 'So', 'Better:'))} {', then '.join(_spoken(puzzle))}. That works.")
        return _answered(lines, expression, correct=True)

    def wrong(rng: random.Random) -> Answer:
        lines = thoughts(rng, rng.choice((0, 0, 1, 1, 2)))
        tried = guessed(rng, len(numbers) - (rng.random() < 0.3), "+-*")
        if tried.answer == target:
            return wrong(rng)
        guess = _expression(tried)
        if rng.random() < 0.2:
            return _answered([*lines, f"So it is {guess}."], None, correct=False)
        lines.append(rng.choice(("This should be close.", f"I think {guess} gives {target}.", "I will take this one.")))
        return _answered(lines, guess, correct=False)

    question = f"Make {target} from the numbers {listed}. You may use + - * and parentheses."
    return _problem("countdown", index, chosen, COUNTDOWN, question, expression, level, right, wrong)


def _answered(lines: list[str], answer: str | None, *, correct: bool) -> Answer:
    text = "<think>\n" + "\n".join(lines) + "\n</think>\n" + (f"<answer>{answer}</answer>" if answer else "")
    metrics = {"correct": float(correct), "format": float(answer is not None)}
    return Answer([Part(text.rstrip())], correct, answer is not None, metrics=metrics)


# Algebra

ALGEBRA = "Solve the problem step by step. Put the final answer in \\boxed{}."


def algebra(chosen: random.Random, index: int) -> Problem:
    """An equation or a percentage."""
    level = _level("algebra", chosen)
    make = (_linear, _percentage, _quadratic, _series)[level - 1]
    question, result, steps, slip = make(chosen)

    def right(rng: random.Random) -> Answer:
        opening = rng.choice(("Let me solve this.", "We go step by step.", ""))
        check = rng.choice(("", f"\n\nInserting ${result}$ confirms it.", "\n\nThis agrees with the question."))
        return _boxed([opening, *steps], result, check, correct=True)

    def wrong(rng: random.Random) -> Answer:
        kept = steps[: rng.randint(1, len(steps) - 1)]
        off = result + rng.choice((-2, -1, 1, 2, 10, result))
        said = rng.choice((slip, "That leaves one step.", "Simplifying gives the result."))
        return _boxed([*kept, said], off, "", correct=False, boxed=rng.random() > 0.15)

    return _problem("algebra", index, chosen, ALGEBRA, question, str(result), level, right, wrong)


def _boxed(lines: list[str], result: int, check: str, *, correct: bool, boxed: bool = True) -> Answer:
    end = f"The answer is $\\boxed{{{result}}}$." if boxed else f"The answer is {result}."
    text = "\n\n".join([line for line in lines if line] + [end]) + check
    metrics = {"correct": float(correct), "format": float(boxed)}
    return Answer([Part(text)], correct, boxed, metrics=metrics)


Sum = tuple[str, int, list[str], str]
"""Question, result, steps of its solution, and a wrong step."""


def _linear(chosen: random.Random) -> Sum:
    a, x, b = chosen.randint(2, 9), chosen.randint(2, 12), chosen.randint(1, 20)
    c = a * x + b
    steps = [
        f"Subtract ${b}$ from both sides:\n$$\n{a}x = {c} - {b} = {c - b}\n$$",
        f"Divide by ${a}$:\n$$\nx = \\frac{{{c - b}}}{{{a}}} = {x}\n$$",
    ]
    return f"Solve for $x$: $\\;{a}x + {b} = {c}$.", x, steps, f"Adding ${b}$ to both sides gives ${a}x = {c + b}$."


def _percentage(chosen: random.Random) -> Sum:
    price, share = 20 * chosen.randint(2, 20), 5 * chosen.randint(1, 9)
    off = price * share // 100
    steps = [
        f"The discount is\n$$\n{price} \\cdot \\frac{{{share}}}{{100}} = {off}\n$$",
        f"The new price is ${price} - {off} = {price - off}$.",
    ]
    question = f"A coat costs {price} euros. Its price falls by {share}\\,%. What is the new price in euros?"
    return question, price - off, steps, f"The discount is ${off}$, which is the new price."


def _quadratic(chosen: random.Random) -> Sum:
    p, q = sorted(chosen.sample(range(1, 12), 2))
    steps = [
        f"We need two numbers with sum ${p + q}$ and product ${p * q}$: these are ${p}$ and ${q}$.",
        f"So\n$$\nx^2 - {p + q}x + {p * q} = (x - {p})(x - {q}) = 0\n$$",
        f"The solutions are $x = {p}$ and $x = {q}$, and the larger one is ${q}$.",
    ]
    question = f"What is the larger solution of $x^2 - {p + q}x + {p * q} = 0$?"
    return question, q, steps, f"The factors are $(x + {p})(x + {q})$."


def _series(chosen: random.Random) -> Sum:
    first, step, count = chosen.randint(1, 9), chosen.randint(2, 6), chosen.randint(6, 20)
    last = first + step * (count - 1)
    total = count * (first + last) // 2
    steps = [
        f"The terms are $a_k = {first} + {step}(k - 1)$, so the last one is $a_{{{count}}} = {last}$.",
        "The sum of an arithmetic series is\n$$\nS = \\frac{n(a_1 + a_n)}{2} = "
        f"\\frac{{{count} \\cdot ({first} + {last})}}{{2}}\n$$",
        f"This is $\\frac{{{count * (first + last)}}}{{2}} = {total}$.",
    ]
    question = (
        f"Add the first {count} terms of the arithmetic sequence ${first}, {first + step}, {first + 2 * step}, \\dots$"
    )
    return question, total, steps, f"There are {count} terms of about ${last}$ each."


# The calculator agent

AGENT = (
    "You compute with a calculator, which does one operation at a time: "
    '<tool_call>{"name": "calculate", "arguments": {"expression": "2+3"}}</tool_call>. '
    "Write the result between <answer> and </answer>."
)


def calculator_agent(chosen: random.Random, index: int) -> Problem:
    """A question that is computed from left to right with a tool."""
    level = _level("calculator_agent", chosen)
    sums = _question(level, chosen)
    steps, result = sums.steps, sums.answer

    def parts(rng: random.Random, num_calls: int, *, broken: bool) -> Iterator[Part]:
        replies: list[tuple[str, ...]] = []
        for place, (expression, value) in enumerate(steps[:num_calls]):
            name, error, said = "calculate", None, str(value)
            if broken and place == 0:
                name, error = "compute", "there is no tool 'compute'; use calculate"
                said = f"Error: {error}"
            arguments = json.dumps({"expression": expression})
            opening = rng.choice(("", f"First {expression}.\n", "Next step.\n")) if place == 0 else ""
            call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            seconds = rng.uniform(0.0004, 0.004)
            record = {"name": name, "arguments": arguments, "result": said, "error": error, "seconds": seconds}
            yield Part(opening + call, [record], replies)
            replies = [("tool", said)]
        yield Part("", [], replies)

    def answer(rng: random.Random, num_calls: int, value: int, *, broken: bool = False) -> Answer:
        *calls, last = parts(rng, num_calls, broken=broken)
        last.text = rng.choice(("", "The calculator says so.\n")) + f"<answer>{value}</answer>"
        used = sum(call["error"] is None for part in calls for call in part.calls)
        correct = value == result and used == len(steps)
        metrics = {
            "correct": float(correct), "right_answer": float(value == result), "format": 1.0,
            "tool_success_rate": used / num_calls if num_calls else 0.0,
        }  # fmt: skip
        return Answer([*calls, last], correct, metrics=metrics)

    def right(rng: random.Random) -> Answer:
        return answer(rng, len(steps), result)

    def wrong(rng: random.Random) -> Answer:
        if rng.random() < 0.3:
            return answer(rng, len(steps), result, broken=True)
        done = rng.randrange(len(steps))
        return answer(rng, done, result + rng.choice((0, 1, -3, 10, 21)))

    question = f"What is {sums.text}, computed from left to right?"
    return _problem("calculator_agent", index, chosen, AGENT, question, str(result), level, right, wrong)


# Shared

MAKERS: dict[str, Callable[[random.Random, int], Problem]] = {
    "countdown": countdown, "algebra": algebra, "calculator_agent": calculator_agent
}  # fmt: skip
TASKS = tuple(MAKERS)

LEVELS = {
    "countdown": ((2, 2), (3, 5), (4, 3)),
    "algebra": ((1, 3), (2, 3), (3, 3), (4, 2)),
    "calculator_agent": ((1, 2), (2, 4), (3, 3)),
}
"""Levels of each task, with their weights: the number of operations, or the kind of question."""


def _level(task: str, chosen: random.Random) -> int:
    levels, weights = zip(*LEVELS[task], strict=True)
    return int(chosen.choices(levels, weights)[0])


def _question(level: int, chosen: random.Random) -> Question:
    """Draws a calculation of `level` operations that a reader can follow."""
    settings = QuestionSettings(level, level, 20, "++--*")
    while not 0 < (question := draw_question(settings, chosen)).answer < 500:
        pass
    return question


def _spoken(question: Question) -> list[str]:
    return [f"{expression} = {value}" for expression, value in question.steps]


def _expression(question: Question) -> str:
    """Writes the question with parentheses where a product comes after a sum."""
    text, weak = str(question.numbers[0]), False
    for sign, number in zip(question.operators, question.numbers[1:], strict=True):
        text = f"({text}) {sign} {number}" if sign == "*" and weak else f"{text} {sign} {number}"
        weak = sign != "*"
    return text
