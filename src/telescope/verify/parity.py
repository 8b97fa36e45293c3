"""Engine and trainer mean the same by a logprob, at the run's temperature; and what top-p does to that.

The engine reports the logprob of the distribution that it sampled from. With `top_p` below 1 that is the kept tokens
(the nucleus) renormalised, while the trainer's is the whole softmax, so the engine's is larger by -log of the kept
mass, which is between top_p and 1. The first claim is therefore checked without top-p; the second says how far apart
the two are with it.
"""

from __future__ import annotations

import math

import numpy as np

from telescope.orchestrator.parts import Parts
from telescope.trainer.batch import StepInput, TrainSample
from telescope.verify.report import Check, compare_logprobs, loosest_tolerance
from telescope.verify.samples import engine_logprobs


async def check_parity(parts: Parts, samples: list[TrainSample], inputs: list[StepInput]) -> Check:
    """The trainer's logprobs of sampled tokens, in the micro-batches of the run, against the engine's."""
    config = parts.config
    return compare_logprobs(
        f"engine and trainer logprobs agree (temperature {config.temperature:g})",
        engine_logprobs(samples),
        await _trainer_logprobs(parts, samples, inputs),
        (config.engine_dtype, trainer_dtype(parts)),
        config.temperature,
    )


async def check_top_p(parts: Parts, samples: list[TrainSample], inputs: list[StepInput]) -> Check:
    """With samples drawn at the run's top_p: every engine logprob is above the trainer's by at most -log(top_p)."""
    config = parts.config
    assert config.top_p is not None
    above_N = engine_logprobs(samples) - await _trainer_logprobs(parts, samples, inputs)
    dtype, tolerance = loosest_tolerance((config.engine_dtype, trainer_dtype(parts)), config.temperature)
    largest = -math.log(config.top_p)
    inside_N = (above_N >= -tolerance.maximum) & (above_N <= largest + tolerance.maximum)
    return Check(
        f"top_p {config.top_p:g} moves engine logprobs by the mass that it cuts off, no more",
        f"engine above trainer by {above_N.mean():.2g} on average, {above_N.min():.2g} to {above_N.max():.2g} nats",
        f"0 to {largest:.3g} for every token, give or take {tolerance.maximum:.1e} ({dtype})",
        ok=bool(inside_N.all()),
        values={
            "tokens": int(above_N.size), "mean": float(above_N.mean()), "min": float(above_N.min()),
            "max": float(above_N.max()), "allowed_max": largest, "tolerance": tolerance.maximum,
        },
    )  # fmt: skip


async def _trainer_logprobs(parts: Parts, samples: list[TrainSample], inputs: list[StepInput]) -> np.ndarray:
    async with parts.trainer.queue:
        by_sample = await parts.trainer.packed_logprobs(inputs)
    return np.concatenate([by_sample[sample.sample_id] for sample in samples])


def trainer_dtype(parts: Parts) -> str:
    """What the trainer computes in."""
    return parts.config.mixed_precision_dtype or parts.config.model_dtype
