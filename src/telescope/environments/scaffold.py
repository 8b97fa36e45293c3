"""Writes a new environment to start from. The folder has a working environment and a passing test of its reward."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from telescope.errors import UserError

KINDS = ("single", "multi", "tools")

_HEAD = '''"""@NAME@: describe the task and what earns a reward."""

'''
_LOAD = """    def load_dataset(self, num_samples=-1, largest=20, seed=0):
        generator = random.Random(seed)  # the same items in every process
        pairs = [(generator.randint(1, largest), generator.randint(1, largest)) for _ in range(100)]
        samples = [Sample(prompt=f"What is {a} + {b}?", answer=str(a + b)) for a, b in pairs]
        return samples if num_samples < 0 else samples[:num_samples]
"""

_SOURCES = {
    "single": _HEAD
    + """import random

from telescope.environments import RewardResult, Sample, SingleTurnEnvironment, extract_answer_tags, strip_think_tags

REQUIRED_PACKAGES = []  # names for pip; a missing one is an error that names the install command


class @CLASS@(SingleTurnEnvironment):
    reward_min, reward_max = 0.0, 1.0
    metrics_ranges = {"correct": {"min": 0.0, "max": 1.0}}

    def __init__(self, instruction_prompt="Write the answer between <answer> and </answer>.", **kwargs):
        super().__init__(instruction_prompt=instruction_prompt, **kwargs)

"""
    + _LOAD
    + """
    def compute_reward(self, completion, sample, eos_token=""):
        answer = extract_answer_tags(strip_think_tags(completion))
        correct = answer == sample.answer
        return RewardResult(
            total_reward=float(correct),
            sample_metrics={"correct": float(correct)},
            golden_answers={"answer": sample.answer},
        )
""",
    "multi": _HEAD
    + """import random

from telescope.environments import MultiTurnEnvironment, RewardResult, Sample, extract_answer_tags

REQUIRED_PACKAGES = []  # names for pip; a missing one is an error that names the install command


class @CLASS@(MultiTurnEnvironment):
    reward_min, reward_max = 0.0, 1.0
    metrics_ranges = {"correct": {"min": 0.0, "max": 1.0}}

    def __init__(self, max_turns=3, system_prompt="Write your answer between <answer> and </answer>.", **kwargs):
        super().__init__(max_turns=max_turns, system_prompt=system_prompt, **kwargs)

"""
    + _LOAD
    + """
    def env_response(self, messages, state):  # called after every answer, the last one included
        state.custom["correct"] = extract_answer_tags(messages[-1]["content"]) == state.sample.answer
        return [{"role": "user", "content": "That is not it. Try again."}]

    def is_done(self, state):
        if state.custom["correct"]:
            return True, "answered"
        return super().is_done(state)  # after max_turns answers

    def compute_reward(self, state, eos_token=""):
        correct = state.custom["correct"]
        return RewardResult(
            total_reward=correct / state.num_turns,  # sooner is better
            sample_metrics={"correct": float(correct), "turns": float(state.num_turns)},
            golden_answers={"answer": state.sample.answer},
        )
""",
    "tools": _HEAD
    + '''import random

from telescope.environments import RewardResult, Sample, ToolEnvironment, extract_answer_tags

REQUIRED_PACKAGES = []  # names for pip; a missing one is an error that names the install command


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


class @CLASS@(ToolEnvironment):
    reward_min, reward_max = 0.0, 1.0
    metrics_ranges = {"correct": {"min": 0.0, "max": 1.0}}

    def __init__(self, max_turns=4, system_prompt="Write your answer between <answer> and </answer>.", **kwargs):
        super().__init__(tools=[add], max_turns=max_turns, system_prompt=system_prompt, **kwargs)

'''
    + _LOAD
    + """
    def compute_reward(self, state, eos_token=""):
        correct = extract_answer_tags(state.trajectory[-1].text) == state.sample.answer
        return RewardResult(
            total_reward=float(correct),
            sample_metrics={"correct": float(correct), **self.get_tool_metrics(state)},
            golden_answers={"answer": state.sample.answer},
        )
""",
}

_TEST_HEAD = '''"""Which answers @NAME@ rewards, and which it does not."""

from pathlib import Path

from telescope.environments.local_rollout import Answer, roll_out_item
from telescope.environments.registry import get_environment


def score(*answers, item=0):
    """Reward and metrics of a rollout with these answers."""
    environment = get_environment("@NAME@", environments_path=[Path(__file__).parent.parent])
    right = environment.get_sample(item).answer
    left = iter(answers)
    rollout = roll_out_item(environment, item, lambda messages: Answer(next(left).replace("RIGHT", right)))
    return rollout.score["total_reward"], rollout.score["sample_metrics"]


def test_the_right_answer_is_rewarded():
    assert score(@RIGHT@)[0] == 1.0


def test_other_answers_are_not():
    for answer in ("", "RIGHT", "<answer>RIGHT", "<answer>0</answer>", "<answer>RIGHT or 0</answer>"):
        assert score(@WRONG@)[0] == 0.0, answer
'''

_TESTS = {
    "single": _TEST_HEAD.replace("@RIGHT@", '"<answer>RIGHT</answer>"').replace("@WRONG@", "answer"),
    "multi": _TEST_HEAD.replace("@RIGHT@", '"<answer>RIGHT</answer>"').replace("@WRONG@", "answer, answer, answer")
    + """

def test_a_later_answer_is_worth_less():
    assert score("<answer>0</answer>", "<answer>RIGHT</answer>")[0] == 0.5
""",
    "tools": _TEST_HEAD.replace(
        "@RIGHT@",
        """'<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', "<answer>RIGHT</answer>\"""",
    ).replace("@WRONG@", "answer")
    + """

def test_a_broken_call_is_reported_to_the_model_and_counted():
    reward, metrics = score('<tool_call>{"name": "add"</tool_call>', "<answer>RIGHT</answer>")
    assert (reward, metrics["tool_error_count"]) == (1.0, 1.0)
""",
}


def write_scaffold(name: str, folder: Path, kind: str) -> list[Path]:
    """Writes `folder/name/environment.py` and its test. Returns the files.

    Raises `UserError` for a name that is not a valid identifier, or when the folder exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(f"{name!r} cannot be the name of an environment: use small letters, digits and underscores.")
    target = folder / name
    if target.exists():
        raise UserError(f"{target} exists already: choose another name or another folder (--folder).")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    files = {"environment.py": _SOURCES[kind], f"test_{name}.py": _TESTS[kind]}
    try:
        target.mkdir(parents=True)
        for file, source in files.items():
            (target / file).write_text(source.replace("@NAME@", name).replace("@CLASS@", class_name), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}): name another folder with --folder.") from error
    return [target / file for file in files]
