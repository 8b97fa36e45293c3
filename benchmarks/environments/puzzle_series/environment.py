"""Several Countdown puzzles in one conversation, each after the answer to the last; for multi-turn runs.

The reward is the share solved, so every turn is worth learning, and a later one has everything before it in its
context.
"""

from __future__ import annotations

from typing import Any

from telescope.environments.base import ChatMessage, MultiTurnEnvironment, RewardResult, RolloutState, Sample
from telescope.environments.countdown.environment import CountdownEnvironment

REQUIRED_PACKAGES: list[str] = []


class PuzzleSeries(MultiTurnEnvironment):
    """`num_puzzles` puzzles of the demo's kind in a row."""

    reward_min, reward_max = 0.0, 1.0

    def __init__(self, num_puzzles: int = 2, portion: str = "train", **kwargs: Any) -> None:
        super().__init__(max_turns=num_puzzles, **kwargs)
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

    def env_response(self, messages: list[ChatMessage], state: RolloutState) -> list[ChatMessage]:
        if state.num_turns == self.num_puzzles:
            return []
        puzzle = self._puzzle(state.sample.metadata["series"], state.num_turns)
        return [{"role": "user", "content": str(puzzle.prompt)}]

    def compute_reward(self, state: RolloutState, eos_token: str = "") -> RewardResult:
        series = state.sample.metadata["series"]
        solved = [
            self.countdown.compute_reward(step.text, self._puzzle(series, turn)).sample_metrics["correct"]
            for turn, step in enumerate(state.trajectory)
        ]
        return RewardResult(
            sum(solved) / self.num_puzzles,
            sample_metrics={f"correct_{turn}": value for turn, value in enumerate(solved)},
            info_turns=[{"turn": turn, "correct": value} for turn, value in enumerate(solved)],
        )
