"""Engine and trainer mean the same by a logprob, at the run's temperature; and what top-p does to that.

The engine reports the logprob of the distribution that it sampled from. With `top_p` below 1 that is the kept tokens
(the nucleus) renormalized, while the trainer's is the whole softmax, so the engine's is larger by -log of the kept
mass, which is between top_p and 1. The first claim is therefore checked without top-p; the second says how far apart
the two are with it.

Packing changes nothing: neither what a token's logprob is, nor the gradient.

The batch is packed as the run would pack it, and once more in another order into rows that hold little more than the
longest sample, which gives other neighbors, other positions, other numbers of micro-batches, and other ranks.

The first training step is on-policy: its KL to the engine is about 0, and its gradient is finite.

The step is a real one and changes the weights, which the proof of weights after it makes use of.

Weights arrive in every engine as they were sent, and a fault of one bit would be noticed.

`weights.probe` compares; here it is asked twice: after an honest sync, where it must find nothing, and after a sync in
which one bit of one tensor was changed on the way, where it must name that tensor and no other.
"""

from __future__ import annotations

import math

import numpy as np

from telescope.orchestrator.run_components import RunComponents
from telescope.trainer.batch import StepInput, TrainSample
from telescope.trainer.packing import pack_step
from telescope.verify.report import Check, compare_logprobs, loosest_tolerance
from telescope.verify.samples import engine_logprobs
from telescope.weights.plan import TensorMeta
from telescope.weights.probe import ProbeReport


async def check_parity(parts: RunComponents, samples: list[TrainSample], inputs: list[StepInput]) -> Check:
    """The trainer's logprobs of sampled tokens, in the micro-batches of the run, against the engine's."""
    config = parts.config
    return compare_logprobs(
        f"engine and trainer logprobs agree (temperature {config.temperature:g})",
        engine_logprobs(samples),
        await _trainer_logprobs(parts, samples, inputs),
        (config.engine_dtype, trainer_dtype(parts)),
        config.temperature,
    )


async def check_top_p(parts: RunComponents, samples: list[TrainSample], inputs: list[StepInput]) -> Check:
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


async def _trainer_logprobs(parts: RunComponents, samples: list[TrainSample], inputs: list[StepInput]) -> np.ndarray:
    async with parts.trainer.queue:
        by_sample = await parts.trainer.packed_logprobs(inputs)
    return np.concatenate([by_sample[sample.sample_id] for sample in samples])


def trainer_dtype(parts: RunComponents) -> str:
    """What the trainer computes in."""
    return parts.config.mixed_precision_dtype or parts.config.model_dtype


GRADIENT_BOUNDS = {"float64": 1e-10, "float32": 1e-5, "float16": 0.05, "bfloat16": 0.05}
"""Relative L2 error of a gradient whose sums run in another order, by the trainer's compute dtype. A mean of means, or
a sample that sees its neighbor, is off by 0.1 and more."""

NUM_SINGLE = 16
"""So many samples are computed one by one."""


def packed(
    parts: RunComponents, samples: list[TrainSample], *, step: int = 0, otherwise: bool = False
) -> list[StepInput]:
    """The samples as one optimizer step for all ranks: as the run packs them, or `otherwise`."""
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


async def check_packed_attention(parts: RunComponents, samples: list[TrainSample], inputs: list[StepInput]) -> Check:
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


async def check_gradient(parts: RunComponents, samples: list[TrainSample]) -> Check:
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


KL_BOUNDS = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}
"""Mean of exp(d) - 1 - d over tokens, d the difference of logprobs: about half its mean square."""


async def check_first_step(parts: RunComponents, inputs: list[StepInput]) -> Check:
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


async def check_weights(parts: RunComponents, when: str) -> Check:
    """Sync and probe; every server must hold what was sent."""
    probes = await parts.weights.prove()
    failed = {server: str(probe) for server, probe in probes.items() if not probe.ok}
    all_servers = len(probes) == parts.config.num_inference_servers
    return Check(
        f"weights {when} are held as sent",
        "; ".join(f"server {server}: {text}" for server, text in failed.items()) or _summary(probes),
        f"{_allowed(probes)} on {parts.config.num_inference_servers} server(s)",
        ok=all_servers and not failed,
        values={
            "servers": len(probes),
            "tensors": min((probe.num_tensors for probe in probes.values()), default=0),
            "mismatched": {str(server): probe.mismatched for server, probe in probes.items() if probe.mismatched},
        },
    )


async def check_corrupted_tensor(parts: RunComponents) -> Check:
    """Sync with one bit changed in one tensor, which every probe must name; then an honest sync to put it right."""
    async with parts.trainer.queue:
        name = tensor_to_corrupt(await parts.trainer.weight_metadata())
    probes = await parts.weights.prove(spoil=name)
    noticed = [server for server, probe in probes.items() if list(probe.mismatched) == [name]]
    mended = await parts.weights.prove()
    still = [server for server, probe in mended.items() if not probe.ok]
    everywhere = len(noticed) == len(mended) == parts.config.num_inference_servers
    named = sorted({wrong for probe in probes.values() for wrong in probe.mismatched})
    measured = f"bit changed in {name}: noticed by {len(noticed)} of {len(probes)} server(s)"
    if not everywhere:
        measured += f", which named {', '.join(named[:4]) or 'nothing'}"
    if still:
        measured += f"; not mended by the next sync on server(s) {', '.join(map(str, still))}"
    return Check(
        "a tensor with one wrong bit is noticed",
        measured,
        "that tensor and no other, on every server; then mended",
        ok=everywhere and not still,
        values={"spoiled": name, "named": named, "noticed_by": noticed, "not_mended_on": still},
    )


def tensor_to_corrupt(metas: list[TensorMeta]) -> str:
    """A matrix from the middle of the model: the kind that hides best."""
    matrices = [meta.name for meta in metas if len(meta.shape) > 1]
    return matrices[len(matrices) // 2]


def _summary(probes: dict[int, ProbeReport]) -> str:
    if not probes:
        return "no server could be asked"
    tensors = min(probe.num_tensors for probe in probes.values())
    logprobs = [probe.logprobs for probe in probes.values() if probe.logprobs is not None]
    text = f"{tensors} of {tensors} tensors bit for bit"
    return text + (f"; logprobs differ by at most {max(p.maximum for p in logprobs):.1e} nats" if logprobs else "")


def _allowed(probes: dict[int, ProbeReport]) -> str:
    bounds = [probe.logprobs.tolerance.maximum for probe in probes.values() if probe.logprobs is not None]
    return "every bit" + (f"; {max(bounds):.0e} nats" if bounds else "")
