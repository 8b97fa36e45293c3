"""MATH-500: 500 test problems of MATH, chosen by Lightman et al. 2023 (https://arxiv.org/abs/2305.20050)."""

from pathlib import Path

from telescope.evals.math_benchmark import MathBenchmark

REQUIRED_PACKAGES = ["math-verify"]
OPTIONAL_PACKAGES = ["datasets"]


class Math500(MathBenchmark):
    """500 competition problems of five levels and seven subjects."""

    hub_dataset = "HuggingFaceH4/MATH-500"
    hub_split = "test"
    own_items = Path(__file__).parent / "items.json"
