"""Prompts and answers of the generated run: arithmetic with right and wrong solutions.

Three tasks, named as environments: `countdown` and `calculator_agent` (tools, several turns) are prompted and scored by
the environments of that name, `algebra` (LaTeX) by a small one. All answers of a problem are made once; a sample
chooses one of them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np

from telescope.environments.base import (
    ChatMessage,
    Environment,
    RewardResult,
    Sample,
    SingleTurnEnvironment,
    TrajectoryStep,
    assistant_message,
    sample_uid,
)
from telescope.environments.calculator_agent.environment import CalculatorAgentEnvironment
from telescope.environments.calculator_agent.questions import Question, QuestionSettings, generate_questions
from telescope.environments.countdown.environment import CountdownEnvironment
from telescope.environments.countdown.puzzles import Puzzle, PuzzleSettings, generate_puzzles, parse
from telescope.environments.serialization import serialize_score
from telescope.environments.worker_pool.messages import PreparedPrompt, RewardRecord
from telescope.rollout.trajectory import Turn
from telescope.rollout.types import Generation

NUM_PROBLEMS = 40
"""Problems of each task and portion."""
NUM_RIGHT, NUM_WRONG = 3, 4
"""Different answers of each problem."""

PIECE = re.compile(r"<\|im_(?:start|end)\|>|</?\w+>| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d<]+| ?<|\s+")
"""A token: a special one, a tag, a word with its blank, a digit, signs, or white space."""

TOKENS: dict[str, int] = {"<unk>": 0}
"""Ids of all tokens so far."""


@dataclass(slots=True)
class Answer:
    """All turns of a sample, without times, and its score."""

    turns: list[Turn]
    reward: RewardRecord


@dataclass(slots=True)
class Problem:
    """A prompt with its answers. `difficulty` is from 0 to 1."""

    task: str
    index: int
    prompt: PreparedPrompt
    difficulty: float
    right: list[Answer]
    wrong: list[Answer]
    looping: Answer
    """An answer that repeats itself until it is cut off."""


class Algebra(SingleTurnEnvironment):
    """Accepts the integer in a box."""

    metrics_ranges = CountdownEnvironment.metrics_ranges

    def load_dataset(self, num_samples: int = -1, **kwargs: Any) -> list[Sample]:
        return []  # `_algebra` draws the problems

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        boxed = re.search(r"\\boxed\{(.*?)\}", completion)
        correct = float(boxed is not None and boxed[1] == sample.answer)
        metrics = {"correct": correct, "format": float(boxed is not None)}
        return RewardResult(correct, metrics, {"answer": sample.answer}, sample_tags={"kind": sample.metadata["kind"]})


ENVIRONMENTS: dict[str, Environment] = {
    "countdown": CountdownEnvironment(format_reward=0.1),
    "algebra": Algebra(system_prompt="Solve the problem step by step. Put the final answer in \\boxed{}."),
    "calculator_agent": CalculatorAgentEnvironment(),
}
TASKS = tuple(ENVIRONMENTS)

Write = Callable[[random.Random, bool], list[str]]
"""Writes the turns of an answer that is right, or one that may be wrong."""


@lru_cache
def problems(portion: str) -> dict[str, list[Problem]]:
    """Returns the problems of each task. `portion` is train or heldout."""
    sources = {"countdown": _countdown(portion), "algebra": _algebra(portion), "calculator_agent": _calculator(portion)}
    return {
        task: [
            _problem(task, index, random.Random(f"{task} {portion} {index}"), *drawn)
            for index, drawn in enumerate(islice(source, NUM_PROBLEMS))
        ]
        for task, source in sources.items()
    }


def tokenizer_json() -> str:
    """Returns the file that turns `TOKENS` back into text, for the token view of the dashboard."""
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor")
    model = {"type": "WordLevel", "vocab": TOKENS, "unk_token": "<unk>"}
    more = {"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "Fuse"}}
    return json.dumps({**dict.fromkeys(names), **more})


def _encode(text: str) -> list[int]:
    return [TOKENS.setdefault(piece, len(TOKENS)) for piece in PIECE.findall(text)]


def _render(messages: Iterable[ChatMessage]) -> str:
    """Writes messages as ChatML, up to where the model answers."""
    texts = (f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return "".join(texts) + "<|im_start|>assistant\n"


def _problem(task: str, index: int, chosen: random.Random, sample: Sample, level: int, write: Write) -> Problem:
    """Makes a problem of `level` 1 to 3 and its answers."""
    environment = ENVIRONMENTS[task]
    if isinstance(environment, CalculatorAgentEnvironment):
        messages = environment.get_initial_prompt(sample)
    else:
        assert isinstance(environment, SingleTurnEnvironment)
        messages = environment.build_messages(sample.prompt)
    text = _render(messages)
    prompt = PreparedPrompt(_encode(text), text, messages, sample_uid(sample))
    right = [_answer(environment, sample, prompt, write(chosen, True), chosen) for _ in range(NUM_RIGHT)]
    wrong: list[Answer] = []
    while len(wrong) < NUM_WRONG:
        answer = _answer(environment, sample, prompt, write(chosen, False), chosen)
        if not answer.reward.sample_metrics["correct"]:
            wrong.append(answer)
    *before, last = write(chosen, False)
    line = chosen.choice(("Wait, let me check this again. ", "Hmm, that is not right. Let me try again. "))
    loop = f"{last.partition('</think>')[0]}\n{line * chosen.randint(18, 30)}".rstrip()
    looping = _answer(environment, sample, prompt, [*before, loop], chosen)
    looping.turns[-1].generation.finish_reason = "length"
    difficulty = level / 4 + chosen.uniform(-0.15, 0.25)
    return Problem(task, index, prompt, min(1.0, max(0.0, difficulty)), right, wrong, looping)


def _answer(
    environment: Environment, sample: Sample, prompt: PreparedPrompt, texts: Sequence[str], chosen: random.Random
) -> Answer:
    """Takes the turns of an answer through the environment."""
    draw = np.random.default_rng(chosen.getrandbits(32))
    turns: list[Turn] = []
    for text in texts:
        ids_N = np.array(_encode(f"{text}<|im_end|>"), dtype=np.int32)
        # Most tokens are nearly certain; a few decide how the answer goes on.
        surprise_N = np.exp(draw.normal(-4.0, 1.2, len(ids_N)))
        surprise_N += (draw.random(len(ids_N)) < 0.12) * draw.gamma(2, 0.6, len(ids_N))
        generation = Generation(ids_N, -surprise_N.astype(np.float32), "stop", [(0, 0, len(ids_N))])
        turns.append(Turn(prompt.token_ids, generation, text))
    if isinstance(environment, CalculatorAgentEnvironment):
        state = environment.create_initial_state(sample)
        for place, turn in enumerate(turns):
            state.trajectory.append(TrajectoryStep([], [assistant_message(turn.text)]))
            done, state.stop_reason = environment.is_done(state)
            if not done and place + 1 < len(turns):
                replies = environment.env_response([], state)
                assert isinstance(replies, list)
                turn.tool_calls, state.tool_records = state.tool_records, []
                turns[place + 1].replies = [(reply["role"], reply["content"]) for reply in replies]
                turns[place + 1].added_token_ids = _encode(_render(replies))
        score = environment.compute_reward(state)
    else:
        assert isinstance(environment, CountdownEnvironment | Algebra)
        score = environment.compute_reward(texts[0], sample)
    return Answer(turns, RewardRecord(**serialize_score(score, for_eval=False)))


def _countdown(portion: str) -> Iterator[tuple[Sample, int, Write]]:
    environment = ENVIRONMENTS["countdown"]
    assert isinstance(environment, CountdownEnvironment)
    for puzzle in generate_puzzles(PuzzleSettings(2, 4, 1, 20, operations="+-*"), 0, portion):
        metadata = {"numbers": list(puzzle.numbers), "target": puzzle.target}
        sample = Sample(environment.question(puzzle.numbers, puzzle.target), str(puzzle.target), metadata)
        yield sample, len(puzzle.numbers) - 1, partial(_try_out, puzzle)


def _try_out(puzzle: Puzzle, rng: random.Random, right: bool) -> list[str]:
    """Writes the thoughts of someone who tries out expressions, then an answer."""

    def guess() -> str:
        first, *others = map(str, rng.sample(puzzle.numbers, len(puzzle.numbers)))
        return first + "".join(f" {rng.choice('++--*')} {number}" for number in others)

    lines = [rng.choice(("I need {} from the numbers.", "The target is {}.", "Goal: {}.")).format(puzzle.target)]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        tried = guess()
        off = parse(tried).value() - puzzle.target
        lines.append(f"Try {tried} = {off + puzzle.target}. That is {abs(off)} too {'large' if off > 0 else 'small'}.")
    answer = puzzle.solution if right else guess()
    lines.append(f"So {answer} = {puzzle.target}. That works." if right else f"I think {answer} is close.")
    tagged = f"<answer>{answer}</answer>" if right or rng.random() > 0.2 else ""
    return ["<think>\n" + "\n".join(lines) + "\n</think>\n" + tagged]


def _algebra(portion: str) -> Iterator[tuple[Sample, int, Write]]:
    chosen = random.Random(f"algebra {portion}")
    while True:
        a, x, b = chosen.randint(2, 9), chosen.randint(2, 12), chosen.randint(1, 20)
        price, share = 20 * chosen.randint(2, 20), 5 * chosen.randint(1, 9)
        off, c = price * share // 100, a * x + b
        p, q = sorted(chosen.sample(range(1, 12), 2))
        kinds = (
            ("linear", f"Solve for $x$: $\\;{a}x + {b} = {c}$.", x, (
                f"Subtract ${b}$ from both sides:\n$$\n{a}x = {c} - {b} = {c - b}\n$$",
                f"Divide by ${a}$:\n$$\nx = \\frac{{{c - b}}}{{{a}}} = {x}\n$$",
            )),
            ("percentage", f"A coat costs {price} euros. What is its price in euros after a discount of {share}\\,%?",
             price - off, (
                f"The discount is\n$$\n{price} \\cdot \\frac{{{share}}}{{100}} = {off}\n$$",
                f"The new price is ${price} - {off} = {price - off}$.",
            )),
            ("quadratic", f"What is the larger solution of $x^2 - {p + q}x + {p * q} = 0$?", q, (
                f"We need two numbers with sum ${p + q}$ and product ${p * q}$: these are ${p}$ and ${q}$.",
                f"So\n$$\nx^2 - {p + q}x + {p * q} = (x - {p})(x - {q}) = 0\n$$",
            )),
        )  # fmt: skip
        level = chosen.randint(1, 3)
        kind, question, result, steps = kinds[level - 1]
        yield Sample(question, str(result), {"kind": kind}), level, partial(_solve, result, steps)


def _solve(result: int, steps: Sequence[str], rng: random.Random, right: bool) -> list[str]:
    """Writes a solution, or its first step and a number that is off."""
    shown = result if right else result + rng.choice((-2, -1, 1, 2, 10))
    answer = f"$\\boxed{{{shown}}}$" if right or rng.random() > 0.15 else shown
    opening = rng.choice(("Let me solve this.", "We go step by step."))
    return ["\n\n".join([opening, *(steps if right else steps[:1]), f"The answer is {answer}."])]


def _calculator(portion: str) -> Iterator[tuple[Sample, int, Write]]:
    environment = ENVIRONMENTS["calculator_agent"]
    assert isinstance(environment, CalculatorAgentEnvironment)
    for question in generate_questions(QuestionSettings(1, 3, 20, "++--*"), 0, portion):
        yield environment.sample_of(question), len(question.steps), partial(_call, question)


def _call(question: Question, rng: random.Random, right: bool) -> list[str]:
    """Writes calls and an answer. A wrong one comes from a tool that does not exist, or from too few calls."""
    steps, broken = question.steps, not right and rng.random() < 0.3
    used = steps if right or broken else steps[: rng.randrange(len(steps))]
    turns = []
    for place, (expression, _) in enumerate(used, 1):
        name = "compute" if broken and place == len(used) else "calculate"
        call = json.dumps({"name": name, "arguments": {"expression": expression}})
        turns.append(f"Step {place}.\n<tool_call>\n{call}\n</tool_call>")
    shown = question.answer + (0 if right or broken else rng.choice((1, -3, 10, 21)))
    return [*turns, rng.choice(("", "The calculator says so.\n")) + f"<answer>{shown}</answer>"]
