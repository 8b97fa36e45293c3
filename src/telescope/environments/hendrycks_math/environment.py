r"""The MATH environment: competition problems with an answer in `\boxed{...}`.

Problems come from the hub (`EleutherAI/hendrycks_math`, the dataset of https://arxiv.org/abs/2103.03874), or from a few
dozen that ship with Telescope (`problems.json`), for tests, demos and machines without a network. The reward is 1 for
an answer that equals the expected one (`parsers.verify_math_answer`) and is as simplified (`worked_out`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from telescope.environments.base import Sample
from telescope.environments.math_problems import MathEnvironment

REQUIRED_PACKAGES = ["math-verify"]
OPTIONAL_PACKAGES = ["datasets"]

SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
"""Subsets of the hub's dataset."""


class HendrycksMathEnvironment(MathEnvironment):
    """Problems of MATH. `dataset_subset` is a subject or null for all, `levels` selects difficulties, 1 to 5.

    The other arguments are those of `MathEnvironment`.
    """

    hub_dataset: ClassVar[str] = "EleutherAI/hendrycks_math"
    hub_subsets: ClassVar[tuple[str | None, ...]] = SUBJECTS

    def load_dataset(  # type: ignore[override]  # passes the others on by name
        self, num_samples: int = -1, levels: list[Literal[1, 2, 3, 4, 5]] | None = None, **options: Any
    ) -> list[Sample]:
        self._levels = levels
        return super().load_dataset(num_samples, **options)

    def select_samples(self, samples: list[Sample], num_samples: int, seed: int | None, source: str) -> list[Sample]:
        if self._levels is not None:
            samples = [sample for sample in samples if sample.metadata["level"] in self._levels]
            source = f"{source}, levels {self._levels!r},"
        return super().select_samples(samples, num_samples, seed, source)
