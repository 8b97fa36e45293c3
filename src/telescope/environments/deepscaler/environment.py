r"""The DeepScaleR environment: 40,000 competition problems with an answer in `\boxed{...}`.

Problems come from the hub (`agentica-org/DeepScaleR-Preview-Dataset`), or are those that ship with `hendrycks_math`,
whose prompts and reward it uses.
"""

from __future__ import annotations

from telescope.environments.base import Sample
from telescope.environments.hendrycks_math.environment import (
    COLUMNS,
    HendrycksMathEnvironment,
    own_problems,
    samples_of,
)
from telescope.environments.hub import hub_rows

REQUIRED_PACKAGES = ["math-verify"]
OPTIONAL_PACKAGES = ["datasets"]

HUB_DATASET = "agentica-org/DeepScaleR-Preview-Dataset"


class DeepScaleREnvironment(HendrycksMathEnvironment):
    """Competition problems of DeepScaleR. The arguments are those of `hendrycks_math`, without `levels`."""

    def load_dataset(  # type: ignore[override]  # `**_` would take the `levels` of the base class
        self,
        num_samples: int = -1,
        dataset: str = "auto",
        dataset_name: str = HUB_DATASET,
        dataset_subset: str | None = None,
        dataset_split: str = "train",
        seed: int | None = None,
    ) -> list[Sample]:
        """The problems as samples. Raises `UserError` when there is none."""
        return self.hub_or_own(
            num_samples,
            seed,
            dataset,
            dataset_name,
            hub=lambda: samples_of(hub_rows(self.name, dataset_name, [dataset_subset], dataset_split, COLUMNS)),
            own=lambda: samples_of(own_problems()),
            own_replaces_hub=dataset_name == HUB_DATASET and dataset_split == "train",
            selection=f"an answer in {dataset_name}",
        )
