"""The American Invitational Mathematics Examination of 2025, both parts."""

from pathlib import Path

from telescope.evals.math_benchmark import MathBenchmark

REQUIRED_PACKAGES = ["math-verify"]
OPTIONAL_PACKAGES = ["datasets"]


class Aime2025(MathBenchmark):
    """30 problems whose answers are whole numbers from 0 to 999."""

    hub_dataset = "opencompass/AIME2025"
    hub_subsets = ("AIME2025-I", "AIME2025-II")
    hub_split = "test"
    own_items = Path(__file__).parent / "items.json"
