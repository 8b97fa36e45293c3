"""Packing changes nothing: neither what a token's logprob is, nor the gradient.

The batch is packed as the run would pack it, and once more in another order into rows that hold little more than the
longest sample, which gives other neighbours, other positions, other numbers of micro-batches, and other ranks.
"""

from __future__ import annotations

import numpy as np

from telescope.orchestrator.parts import Parts
from telescope.trainer.batch import StepInput, TrainSample
from telescope.trainer.packing import pack_step
from telescope.verify.parity import trainer_dtype
from telescope.verify.report import Check, compare_logprobs

GRADIENT_BOUNDS = {"float64": 1e-10, "float32": 1e-5, "float16": 0.05, "bfloat16": 0.05}
"""Relative L2 error of a gradient whose sums run in another order, by the trainer's compute dtype. A mean of means, or
a sample that sees its neighbour, is off by 0.1 and more."""

NUM_SINGLE = 16
"""So many samples are computed one by one."""


def packed(parts: Parts, samples: list[TrainSample], *, step: int = 0, otherwise: bool = False) -> list[StepInput]:
    """The samples as one optimiser step for all ranks: as the run packs them, or `otherwise`."""
    config = parts.config
    seq_len = config.seq_len
    if otherwise:
        order = np.random.default_rng(0).permutation(len(samples))
        samples = [samples[i] for i in order]
        seq_len = max(sample.length for sample in samples) + min(sample.length for sample in samples)
    return pack_step(
        samples,
        step=step,
        version=step,
        seq_len=seq_len,
        num_ranks=config.trainer_num_workers,
        pad_to_multiple_of=1 if otherwise else config.pad_to_multiple_of,
    )


async def check_packed_attention(parts: Parts, samples: list[TrainSample], inputs: list[StepInput]) -> Check:
    """Logprobs in a packed row against the same sample computed alone."""
    config = parts.config
    chosen = samples[:: max(1, len(samples) // NUM_SINGLE)][:NUM_SINGLE]
    async with parts.trainer.queue:
        by_sample = await parts.trainer.packed_logprobs(inputs)
        alone = []
        for sample in chosen:
            # One number for each token but the first; those of trained tokens are compared.
            logprobs = await parts.trainer.sequence_logprobs(sample.token_ids_L.tolist(), config.temperature)
            alone.append(np.array(logprobs)[sample.trained_L[1:]])
    return compare_logprobs(
        "packed and single samples have equal logprobs",
        np.concatenate([by_sample[sample.sample_id] for sample in chosen]),
        np.concatenate(alone),
        (trainer_dtype(parts),),
        config.temperature,
    )


async def check_gradient(parts: Parts, samples: list[TrainSample]) -> Check:
    """The gradient of the batch in two packings."""
    async with parts.trainer.queue:
        found = await parts.trainer.compare_gradients(packed(parts, samples), packed(parts, samples, otherwise=True))
    dtype = trainer_dtype(parts)
    bound = GRADIENT_BOUNDS[dtype]
    first, second = found.num_micro_batches
    return Check(
        "the gradient does not depend on packing",
        f"relative L2 error {found.relative_error:.1e}; loss {found.losses[0]:.6g} and {found.losses[1]:.6g}; "
        f"{first} and {second} micro-batches on rank 0",
        f"{bound:.0e} ({dtype})",
        ok=bool(found.relative_error <= bound),
        values={
            "relative_error": found.relative_error, "allowed": bound, "norms": list(found.norms),
            "losses": list(found.losses), "micro_batches": [first, second],
        },
    )  # fmt: skip
