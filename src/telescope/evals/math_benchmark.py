"""Base of the mathematical benchmarks: scoring of `hendrycks_math`, datasets of the hub."""

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

from telescope.environments.hub import hub_rows
from telescope.environments.math_problems import COLUMNS, INSTRUCTION_PROMPT, samples_of
from telescope.environments.records import Sample
from telescope.errors import UserError
from telescope.evals.base import Eval


class MathBenchmark(Eval):
    """Problems with one answer each.

    `dataset` is `hub`, or `own` for the few items that ship with Telescope, whose accuracy is not the benchmark's.
    `instruction_prompt_post` follows a problem. Other arguments are those of `hendrycks_math`.
    """

    environment_name = "hendrycks_math"
    environment_kwargs: ClassVar[dict[str, Any]] = {
        "instruction_prompt": None,
        "instruction_prompt_post": INSTRUCTION_PROMPT,
    }
    hub_dataset: ClassVar[str]
    hub_subsets: ClassVar[tuple[str | None, ...]] = (None,)
    """Subsets of `hub_dataset` in the benchmark. Any other dataset is read whole."""
    hub_split: ClassVar[str]
    own_items: ClassVar[Path]

    def load_dataset(
        self,
        num_samples: int = -1,
        dataset: Literal["hub", "own"] = "hub",
        dataset_name: str | None = None,
        dataset_split: str | None = None,
        **_: Any,
    ) -> list[Sample]:
        """Returns the problems as samples. Raises `UserError` if there are none."""
        name = dataset_name or self.hub_dataset
        if dataset == "own":
            samples = samples_of(json.loads(self.own_items.read_text(encoding="utf-8")))
        else:
            subsets = self.hub_subsets if name == self.hub_dataset else (None,)
            samples = samples_of(hub_rows(self.name, name, subsets, dataset_split or self.hub_split, COLUMNS))
        if not samples:
            raise UserError(f"{self.name}: no problem of {name!r} has an answer.")
        return samples if num_samples < 0 else samples[:num_samples]
