r"""The DeepScaleR environment: 40,000 competition problems with an answer in `\boxed{...}`.

Problems come from the hub (`agentica-org/DeepScaleR-Preview-Dataset`), or are those that ship with `hendrycks_math`,
whose prompts and reward it uses.
"""

from __future__ import annotations

from typing import ClassVar

from telescope.environments.math_problems import MathEnvironment

REQUIRED_PACKAGES = ["math-verify"]
OPTIONAL_PACKAGES = ["datasets"]


class DeepScaleREnvironment(MathEnvironment):
    """Competition problems of DeepScaleR. Its arguments are those of `hendrycks_math` but `levels`."""

    hub_dataset: ClassVar[str] = "agentica-org/DeepScaleR-Preview-Dataset"
