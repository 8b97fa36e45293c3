"""Countdown with a tool: what stands between `<answer>` tags is a call of `check`, which says what it comes to.

A wrong answer may be mended once. Made for a model that was warm-started on Countdown alone: it calls the tool in the
words that it knows.
"""

from __future__ import annotations

from typing import Any, ClassVar

from telescope.environments.base import RewardResult, RolloutState, Sample
from telescope.environments.countdown.environment import CountdownEnvironment
from telescope.environments.parsers import extract_answer_tags
from telescope.environments.tool_env import ToolCall, ToolEnvironment

REQUIRED_PACKAGES: list[str] = []


class CheckedPuzzles(ToolEnvironment):
    """The demo's puzzles, each with `max_turns` tries."""

    reward_min, reward_max = 0.0, 1.0
    metrics_ranges: ClassVar[dict[str, dict[str, float]]] = {"correct": {"min": 0.0, "max": 1.0}}

    def __init__(self, max_turns: int = 2, **kwargs: Any) -> None:
        super().__init__(tools=[self.check], max_turns=max_turns, include_tool_schemas_in_prompt=False, **kwargs)
        self.countdown = CountdownEnvironment(
            prompt_style="short", operations="+-", format_reward=0.0, dataset="generated", portion="train",
            min_numbers=3, max_numbers=3, max_number=10,
        )  # fmt: skip

    def load_dataset(self, num_samples: int = -1, **_: Any) -> list[Sample]:
        count = len(self.countdown) if num_samples < 0 else num_samples
        return [self.countdown.get_sample(index) for index in range(count)]

    def check(self, expression: str, state: RolloutState) -> str:
        """Say whether an expression solves the puzzle."""
        solved = self._solves(expression, state.sample)
        state.custom["solved"] = solved
        return "right" if solved else "wrong"

    def _solves(self, expression: str, sample: Sample) -> bool:
        result = self.countdown.compute_reward(f"<answer>{expression}</answer>", sample)
        return result.sample_metrics["correct"] == 1.0

    def parse_tool_calls(self, completion: str) -> list[ToolCall]:
        answer = extract_answer_tags(completion)
        return [] if answer is None else [ToolCall("check", {"expression": answer}, completion)]

    def is_done(self, state: RolloutState) -> tuple[bool, str | None]:
        # Asked before and after the call is run: a solved puzzle ends, and so does the last try once it was checked.
        if state.custom.get("solved"):
            return True, "solved"
        if self.is_final_answer(state.trajectory[-1].completion, state):
            return True, "final_answer"
        num_checked = len(state.custom.get("tool_results", ()))
        return (True, "max_turns") if num_checked >= self.max_turns else (False, None)

    def compute_reward(self, state: RolloutState, eos_token: str = "") -> RewardResult:
        solved = float(bool(state.custom.get("solved")))
        return RewardResult(solved, sample_metrics={"correct": solved, **self.get_tool_metrics(state)})
