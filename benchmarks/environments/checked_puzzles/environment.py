"""Countdown puzzles submitted through a tool, whose reply is the next puzzle.

Text between `<answer>` tags is a call of `submit`. Made for a model that was warm-started on Countdown alone: it calls
the tool in the words that it knows.
"""

from __future__ import annotations

from typing import Any, ClassVar

from telescope.environments.base import RewardResult, RolloutState, Sample
from telescope.environments.countdown.environment import CountdownEnvironment
from telescope.environments.parsers import extract_answer_tags
from telescope.environments.tool_env import ToolCall, ToolEnvironment

REQUIRED_PACKAGES: list[str] = []
SOLVED = "solved"
"""Key of `state.custom` with the correctness of every submitted puzzle."""


class CheckedPuzzles(ToolEnvironment):
    """`num_puzzles` puzzles of the demo's kind in a row. The reward is the share submitted and right."""

    reward_min, reward_max = 0.0, 1.0
    metrics_ranges: ClassVar[dict[str, dict[str, float]]] = {"correct": {"min": 0.0, "max": 1.0}}

    tool_role = "tool"

    def __init__(self, num_puzzles: int = 2, portion: str = "train", **kwargs: Any) -> None:
        super().__init__(tools=[self.submit], max_turns=num_puzzles, include_tool_schemas_in_prompt=False, **kwargs)
        self.num_puzzles = num_puzzles
        self.countdown = CountdownEnvironment(
            prompt_style="short", operations="+-", format_reward=0.0, dataset="generated", portion=portion,
            min_numbers=3, max_numbers=3, max_number=10,
        )  # fmt: skip

    def load_dataset(self, num_samples: int = -1, **_: Any) -> list[Sample]:
        count = len(self.countdown) // self.num_puzzles
        samples = [Sample(str(self._puzzle(series, 0).prompt), metadata={"series": series}) for series in range(count)]
        return samples if num_samples < 0 else samples[:num_samples]

    def _puzzle(self, series: int, turn: int) -> Sample:
        return self.countdown.get_sample(series * self.num_puzzles + turn)

    def submit(self, expression: str, state: RolloutState) -> str:
        """Submit an expression and get the next puzzle."""
        solved: list[float] = state.custom.setdefault(SOLVED, [])
        series = state.sample.metadata["series"]
        result = self.countdown.compute_reward(f"<answer>{expression}</answer>", self._puzzle(series, len(solved)))
        solved.append(result.sample_metrics["correct"])
        return "done" if len(solved) == self.num_puzzles else str(self._puzzle(series, len(solved)).prompt)

    def parse_tool_calls(self, completion: str) -> list[ToolCall]:
        answer = extract_answer_tags(completion)
        return [] if answer == "" else [ToolCall("submit", {"expression": answer}, completion)]

    def is_done(self, state: RolloutState) -> tuple[bool, str | None]:
        # The last puzzle is submitted before the conversation ends.
        if self.is_final_answer(state.trajectory[-1].text, state):
            return True, "final_answer"
        return (True, "all_in") if len(state.custom.get(SOLVED, ())) == self.num_puzzles else (False, None)

    def compute_reward(self, state: RolloutState, eos_token: str = "") -> RewardResult:
        solved = [*state.custom.get(SOLVED, ()), *[0.0] * self.num_puzzles][: self.num_puzzles]
        share = sum(solved) / self.num_puzzles
        return RewardResult(
            share,
            sample_metrics={"correct": share, **self.get_tool_metrics(state)},
            info_turns=[{"turn": turn, "correct": value} for turn, value in enumerate(solved)],
        )
