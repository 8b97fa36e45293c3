"""Convert a length with a tool, which is called in the syntax of Python."""

from telescope.environments import RewardResult, Sample, ToolEnvironment, extract_answer_tags, verify_exact_match


def to_feet(meters: float, digits: int = 1) -> str:
    """Convert meters to feet.

    Args:
        meters: the length
        digits: digits after the point
    """
    return f"{meters / 0.3048:.{digits}f}"


class UnitTools(ToolEnvironment):
    def __init__(self, **kwargs):
        super().__init__(tools=[to_feet], tool_call_format="function", **kwargs)

    def load_dataset(self, num_samples=-1, **kwargs):
        return [Sample(f"How many feet are {m} meters?", answer=f"{m / 0.3048:.1f}") for m in (2, 10, 8848)]

    def format_tool_result(self, result):
        return super().format_tool_result(result) + f" ({self.unit})"

    def compute_reward(self, state, eos_token=""):
        answer = extract_answer_tags(state.trajectory[-1].completion[0]["content"])
        right = verify_exact_match(answer, state.sample.answer)
        used = state.custom["tool_success_count"] > 0
        return RewardResult(
            total_reward=float(right and used),
            sample_metrics=self.get_tool_metrics(state),
            info_turns=[dict(result) for result in state.custom["tool_results"]],
        )
