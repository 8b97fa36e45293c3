r"""The DeepScaleR environment: 40,000 competition problems with an answer in `\boxed{...}`.

Problems come from the hub (`agentica-org/DeepScaleR-Preview-Dataset`), or are the ones that ship with `hendrycks_math`.
Prompts and reward are the same as in `hendrycks_math`.
"""

from __future__ import annotations

from typing import ClassVar

from telescope.environments.math_problems import MathEnvironment

REQUIRED_PACKAGES = ["math-verify"]
OPTIONAL_PACKAGES = ["datasets"]


class DeepScaleREnvironment(MathEnvironment):
    """Competition problems of DeepScaleR. Its arguments are those of `hendrycks_math` but `levels`."""

    hub_dataset: ClassVar[str] = "agentica-org/DeepScaleR-Preview-Dataset"
