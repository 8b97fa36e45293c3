"""The first training step is on-policy: its KL to the engine is about 0, and its gradient is finite.

The step is a real one and changes the weights, which the proof of weights after it makes use of.
"""

from __future__ import annotations

import math

from telescope.orchestrator.parts import Parts
from telescope.trainer.batch import StepInput
from telescope.verify.parity import trainer_dtype
from telescope.verify.report import Check, loosest_tolerance

KL_BOUNDS = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}
"""Mean of exp(d) - 1 - d over tokens, d the difference of logprobs: about half its mean square."""


async def check_first_step(parts: Parts, inputs: list[StepInput]) -> Check:
    """One training step of samples that the same weights produced."""
    config = parts.config
    metrics = (await parts.trainer.train_step(inputs)).metrics
    dtype, _ = loosest_tolerance((config.engine_dtype, trainer_dtype(parts)), 1.0)
    bound = KL_BOUNDS[dtype if dtype in KL_BOUNDS else "float32"] / min(config.temperature, 1.0) ** 2
    kl, norm = metrics["kl_divergence_inference"], metrics["grad_norm"]
    return Check(
        "the first training step is on-policy",
        f"KL to the engine {kl:.1e}; gradient norm {norm:.3g}; learning rate {metrics['learning_rate']:.3g}",
        f"KL at most {bound:.1e} ({dtype}); a finite gradient that is not 0",
        ok=bool(abs(kl) <= bound and math.isfinite(norm) and norm > 0),
        values={"kl": kl, "allowed": bound, "grad_norm": norm, "learning_rate": metrics["learning_rate"]},
    )
