"""The American Invitational Mathematics Examination of 2024, both parts."""

from pathlib import Path

from telescope.evals.math_benchmark import MathBenchmark

REQUIRED_PACKAGES = ["math-verify"]
OPTIONAL_PACKAGES = ["datasets"]


class Aime2024(MathBenchmark):
    """30 problems whose answers are whole numbers from 0 to 999."""

    hub_dataset = "HuggingFaceH4/aime_2024"
    hub_split = "train"
    own_items = Path(__file__).parent / "items.json"
