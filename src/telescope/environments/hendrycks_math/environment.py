r"""The MATH environment: competition problems with an answer in `\boxed{...}`.

Problems come from the hub (`EleutherAI/hendrycks_math`, the dataset of https://arxiv.org/abs/2103.03874), or from a few
dozen that ship with Telescope (`problems.json`), for tests, demos and machines without a network. The reward is 1 for
an answer that equals the expected one (`parsers.verify_math_answer`) and is as simplified (`worked_out`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from telescope.environments.base import Sample
from telescope.environments.hub import hub_rows
from telescope.environments.math_problems import COLUMNS, MathEnvironment, own_problems, samples_of
from telescope.errors import UserError

REQUIRED_PACKAGES = ["math-verify"]
OPTIONAL_PACKAGES = ["datasets"]

HUB_DATASET = "EleutherAI/hendrycks_math"
SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
"""Subsets of the hub's dataset."""


class HendrycksMathEnvironment(MathEnvironment):
    """Problems of MATH. `dataset_subset` is a subject or null for all, `levels` selects difficulties, 1 to 5.

    The other arguments are those of `MathEnvironment`.
    """

    hub_dataset: ClassVar[str] = HUB_DATASET

    def load_dataset(
        self,
        num_samples: int = -1,
        dataset: str = "hub",
        dataset_name: str | None = None,
        dataset_subset: str | None = None,
        dataset_split: str = "train",
        seed: int | None = None,
        levels: list[int] | None = None,
        **_: Any,
    ) -> list[Sample]:
        """Returns the problems as samples. Raises `UserError` if there is none."""
        if levels is not None and not set(levels) <= {1, 2, 3, 4, 5}:
            raise UserError(f"hendrycks_math: levels is {levels!r}; use some of 1 to 5.")
        name = dataset_name or self.hub_dataset
        subsets: tuple[str | None, ...] = (dataset_subset,)
        if dataset_subset is None and name == HUB_DATASET:
            subsets = SUBJECTS

        def of_levels(rows: Iterable[dict[str, Any]]) -> list[Sample]:
            found = samples_of(rows)
            return found if levels is None else [sample for sample in found if sample.metadata["level"] in levels]

        return self.select_samples(
            num_samples,
            seed,
            dataset,
            hub=lambda: of_levels(hub_rows(self.name, name, subsets, dataset_split, COLUMNS)),
            own=lambda: of_levels(own_problems(dataset_subset)),
            selection=f"dataset_subset {dataset_subset!r} and levels {levels!r}",
        )
