"""The checks of `telescope verify`: logprobs, packing, training, weights.

- Engine and trainer agree on logprobs at the run's temperature. The engine reports the logprob of the distribution that
  it sampled from. With `top_p` below 1 that is the renormalized nucleus, while the trainer's is the whole softmax, so
  the engine's logprob is larger by -log of the kept mass, which is between top_p and 1. The first check therefore
  samples without top_p; a second one bounds the difference with it.
- Packing changes neither logprobs nor the gradient. The batch is packed as in the run, and again in another order into
  rows that are little longer than the longest sample, which changes neighbors, positions, micro-batches and ranks.
- The first training step is on-policy: its KL to the engine is about 0 and its gradient is finite. It changes the
  weights, which the next check of weights needs.
- Weights arrive in every engine as they were sent. `weights.probe` must find nothing after a correct sync, and after a
  sync with one changed bit it must name that tensor and no other.

The samples are rolled out like any others (`rollout.sample`), through request slots and on all servers. Their
advantages are random and never 0, so that every sample contributes to a gradient, even where all rewards of a group are
equal.
"""

import asyncio
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from telescope.errors import RunError
from telescope.orchestrator.run_components import RunComponents
from telescope.rollout.sample import RolloutTask
from telescope.rollout.trajectory import Trajectory
from telescope.trainer.batch import StepInput, TrainSample
from telescope.trainer.packing import pack_step, truncate_to
from telescope.weights.plan import TensorMeta
from telescope.weights.probe import ProbeReport, loosest_tolerance


@dataclass(frozen=True)
class Check:
    """One claim with its measurement, its bound and the result. `values` has all numbers."""

    name: str
    measured: str
    bound: str
    ok: bool
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """All checks of one verification, in order."""

    checks: list[Check] = field(default_factory=list)
    config_hash: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Returns whether there are checks and all of them passed."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of `--json`."""
        return {"ok": self.ok, **asdict(self), "seconds": round(self.seconds, 3)}


async def check_parity(components: RunComponents, samples: list[TrainSample], inputs: list[StepInput]) -> Check:
    """Compares the trainer's logprobs in the run's micro-batches with the engine's."""
    config = components.config
    return compare_logprobs(
        f"engine and trainer logprobs agree (temperature {config.temperature:g})",
        engine_logprobs(samples),
        await _trainer_logprobs(components, samples, inputs),
        config.precisions,
        config.temperature,
    )


async def check_top_p(components: RunComponents, samples: list[TrainSample], inputs: list[StepInput]) -> Check:
    """Checks how far engine logprobs under top_p exceed the trainer's: at most -log(top_p)."""
    config = components.config
    assert config.top_p is not None
    above_N = engine_logprobs(samples) - await _trainer_logprobs(components, samples, inputs)
    dtype, tolerance = loosest_tolerance(config.precisions, config.temperature)
    largest = -math.log(config.top_p)
    inside_N = (above_N >= -tolerance.maximum) & (above_N <= largest + tolerance.maximum)
    return Check(
        f"top_p {config.top_p:g} raises engine logprobs by the mass that it cuts off, and no more",
        f"engine above trainer by {above_N.mean():.2g} on average, {above_N.min():.2g} to {above_N.max():.2g} nats",
        f"0 to {largest:.3g} for every token, +- {tolerance.maximum:.1e} ({dtype})",
        ok=bool(inside_N.all()),
        values={
            "tokens": int(above_N.size), "mean": float(above_N.mean()), "min": float(above_N.min()),
            "max": float(above_N.max()), "allowed_max": largest, "tolerance": tolerance.maximum,
        },
    )  # fmt: skip


async def _trainer_logprobs(
    components: RunComponents, samples: list[TrainSample], inputs: list[StepInput]
) -> np.ndarray:
    async with components.trainer.queue:
        by_sample = await components.trainer.packed_logprobs(inputs)
    return np.concatenate([by_sample[sample.sample_id] for sample in samples])


GRADIENT_BOUNDS = {"float64": 1e-10, "float32": 1e-5, "float16": 0.05, "bfloat16": 0.05}
"""Relative L2 error of a gradient that is summed in another order, by the trainer's compute dtype. A mean of means, or
a sample that attends to its neighbor, causes an error of 0.1 and more."""

NUM_SINGLE = 16
"""Samples that are computed one by one."""


def packed(components: RunComponents, samples: list[TrainSample], *, otherwise: bool = False) -> list[StepInput]:
    """Packs the samples as one optimizer step for all ranks, as in the run or `otherwise`."""
    config = components.config
    seq_len = config.seq_len
    if otherwise:
        order = np.random.default_rng(0).permutation(len(samples))
        samples = [samples[i] for i in order]
        lengths = [sample.length for sample in samples]
        seq_len = min(seq_len, max(lengths) + min(lengths))  # memory suffices for rows of the run
    return pack_step(
        samples,
        step=0,
        version=0,
        seq_len=seq_len,
        num_ranks=components.trainer.data_size,
        pad_to_multiple_of=1 if otherwise else config.pad_to_multiple_of,
        packs=components.trainer.packs,
    )


async def check_packed_attention(
    components: RunComponents, samples: list[TrainSample], inputs: list[StepInput]
) -> Check:
    """Compares logprobs of packed samples with logprobs of single samples."""
    config = components.config
    chosen = samples[:: max(1, len(samples) // NUM_SINGLE)][:NUM_SINGLE]
    async with components.trainer.queue:
        alone = []
        for sample in chosen:
            # One logprob for each token except the first.
            logprobs = await components.trainer.sequence_logprobs(sample.token_ids_L.tolist(), config.temperature)
            alone.append(np.array(logprobs)[sample.trained_L[1:]])
    return compare_logprobs(
        "packed and single samples have equal logprobs",
        await _trainer_logprobs(components, chosen, inputs),
        np.concatenate(alone),
        (components.config.compute_dtype,),
        config.temperature,
    )


async def check_gradient(components: RunComponents, samples: list[TrainSample]) -> Check:
    """Compares the gradients of one batch in two packings."""
    async with components.trainer.queue:
        found = await components.trainer.compare_gradients(
            packed(components, samples), packed(components, samples, otherwise=True)
        )
    dtype = components.config.compute_dtype
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


KL_BOUNDS = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2, "fp8_per_block": 0.1}
"""Mean of exp(d) - 1 - d over tokens, d the difference of logprobs: about half of its mean square."""


async def check_first_step(components: RunComponents, inputs: list[StepInput]) -> Check:
    """Trains one step on-policy and checks its KL and gradient."""
    config = components.config
    name = "the first training step is on-policy"
    try:
        metrics = (await components.trainer.train_step(inputs)).metrics
    except RunError as error:  # the trainer's own comparison with the engine failed
        return Check(name, str(error), "no more than rounding", ok=False)
    dtype, _ = loosest_tolerance(config.precisions, 1.0)
    bound = KL_BOUNDS[dtype if dtype in KL_BOUNDS else "float32"] / min(config.temperature, 1.0) ** 2
    kl, norm = metrics["kl_divergence_inference"], metrics["grad_norm"]
    return Check(
        name,
        f"KL to the engine {kl:.1e}; gradient norm {norm:.3g}; learning rate {metrics['learning_rate']:.3g}",
        f"KL at most {bound:.1e} ({dtype}); a finite gradient that is not 0",
        ok=bool(abs(kl) <= bound and math.isfinite(norm) and norm > 0),
        values={"kl": kl, "allowed": bound, "grad_norm": norm, "learning_rate": metrics["learning_rate"]},
    )


async def check_weights(components: RunComponents, when: str) -> Check:
    """Syncs and compares. Every server must have the weights that were sent."""
    probes = await components.weights.verify()
    failed = {server: str(probe) for server, probe in probes.items() if not probe.ok}
    all_servers = len(probes) == components.config.num_inference_servers
    return Check(
        f"weights {when} are loaded as sent",
        "; ".join(f"server {server}: {text}" for server, text in failed.items()) or _summary(probes),
        f"{_allowed(probes)} on {components.config.num_inference_servers} server(s)",
        ok=all_servers and not failed,
        values={
            "servers": len(probes),
            "tensors": min((probe.num_tensors for probe in probes.values()), default=0),
            "mismatched": {str(server): probe.mismatched for server, probe in probes.items() if probe.mismatched},
        },
    )


async def check_corrupted_tensor(components: RunComponents) -> Check:
    """Syncs with one changed bit, which every probe must name. Then restores the weights by a correct sync."""
    async with components.trainer.queue:
        name = tensor_to_corrupt(await components.trainer.weight_metadata())
    probes = await components.weights.verify(corrupt=name)
    detected = [server for server, probe in probes.items() if list(probe.mismatched) == [name]]
    restored = await components.weights.verify()
    wrong = [server for server, probe in restored.items() if not probe.ok]
    everywhere = len(detected) == len(restored) == components.config.num_inference_servers
    named = sorted({tensor for probe in probes.values() for tensor in probe.mismatched})
    measured = f"bit changed in {name}: detected on {len(detected)} of {len(probes)} server(s)"
    if not everywhere:
        measured += f", which named {', '.join(named[:4]) or 'nothing'}"
    if wrong:
        measured += f"; not restored by the next sync on server(s) {', '.join(map(str, wrong))}"
    return Check(
        "a tensor with one wrong bit is detected",
        measured,
        "that tensor and no other, on every server; then restored",
        ok=everywhere and not wrong,
        values={"corrupted": name, "named": named, "detected_on": detected, "not_restored_on": wrong},
    )


def tensor_to_corrupt(metas: list[TensorMeta]) -> str:
    """Returns the name of a matrix from the middle of the model."""
    matrices = [meta.name for meta in metas if len(meta.shape) > 1]
    return matrices[len(matrices) // 2]


def _summary(probes: dict[int, ProbeReport]) -> str:
    if not probes:
        return "no server answered"
    tensors = min(probe.num_tensors for probe in probes.values())
    logprobs = [probe.logprobs for probe in probes.values() if probe.logprobs is not None]
    is_adapter = any(probe.has_adapter for probe in probes.values())
    text = "the adapter is loaded" if is_adapter else f"{tensors} of {tensors} tensors bit for bit"
    return text + (f"; logprobs differ by at most {max(p.maximum for p in logprobs):.1e} nats" if logprobs else "")


def _allowed(probes: dict[int, ProbeReport]) -> str:
    bounds = [probe.logprobs.tolerance.maximum for probe in probes.values() if probe.logprobs is not None]
    exact = [] if any(probe.has_adapter for probe in probes.values()) else ["every bit"]
    return "; ".join(exact + ([f"{max(bounds):.0e} nats"] if bounds else []))


NUM_SAMPLES = 32
"""Minimum number of samples: enough tokens to detect a fault within a short time."""

FIRST_GROUP = -1_000_000_000
"""First group id, below all group ids of prompts and evals."""


async def sample_groups(
    components: RunComponents, *, top_p: float | None, on_sample: Callable[[], None] = lambda: None
) -> list[TrainSample]:
    """Samples whole groups at the run's temperature, at least one per server. `top_p` replaces the run's.

    Raises RunError when too few samples were scored.
    """
    config = components.config
    num_groups = max(config.num_inference_servers, math.ceil(NUM_SAMPLES / config.group_size))
    settings = replace(components.settings, sampling=replace(components.settings.sampling, top_p=top_p))
    key = components.keys.training[0]
    num_items = components.rollouts.infos[key].num_samples

    async def sample_group(group: int) -> list[Trajectory]:
        prompt = await components.rollouts.prepare(key, group % num_items)
        tasks = [
            RolloutTask(
                sample_id=f"verify-{top_p}-{group}-{index}",
                group_id=FIRST_GROUP + group,
                sample_index=index,
                environment=config.environments[0].name,
                environment_key=key,
                item_index=group % num_items,
                prompt_token_ids=prompt.token_ids,
                seed=(config.seed, "verify", group, index),
            )
            for index in range(config.group_size)
        ]
        trajectories = await components.rollouts.run(tasks, settings)
        for _ in trajectories:
            on_sample()
        return trajectories

    groups = await asyncio.gather(*(sample_group(group) for group in range(num_groups)))
    trajectories = [trajectory for group in groups for trajectory in group]
    scored = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    samples = [sample for trajectory in scored for sample in trajectory.sequences()]
    samples, _ = truncate_to([sample for sample in samples if sample.num_trained], config.seq_len)
    if 2 * len(scored) < len(trajectories) or len(samples) < 3:
        reasons = {trajectory.failure_message for trajectory in trajectories if trajectory.reward is None}
        raise RunError(
            f"too few samples to verify with: {len(scored)} of {len(trajectories)} were scored, {len(samples)} have "
            f"trained tokens ({'; '.join(map(str, reasons)) or 'no failure'})"
        )
    for sample in samples:
        rng = np.random.default_rng(zlib.crc32(sample.sample_id.encode()))
        sample.advantage = float(rng.choice([-1.0, 1.0]) * rng.uniform(0.5, 1.5))
    return samples


def engine_logprobs(samples: list[TrainSample]) -> np.ndarray:
    """Returns the engine's logprobs of all trained tokens, sample by sample."""
    return np.concatenate([sample.engine_logprob_L[sample.trained_L] for sample in samples])


def compare_logprobs(
    name: str, one_N: np.ndarray, other_N: np.ndarray, dtypes: Sequence[str], temperature: float
) -> Check:
    """Compares two computations of the same logprobs, with the tolerance of their dtypes.

    The mean is bounded, and in float32 the maximum. In half precision a rare token can have a large error, so the 99th
    percentile is bounded instead.
    """
    difference_N = np.abs(np.asarray(one_N, np.float64) - np.asarray(other_N, np.float64))
    if difference_N.size == 0:
        return Check(name, "no token to compare", "", ok=False)
    dtype, tolerance = loosest_tolerance(dtypes, temperature)
    maximum, mean, p99 = difference_N.max(), difference_N.mean(), np.quantile(difference_N, 0.99)
    outermost, of = (p99, "p99") if dtype != "float32" else (maximum, "max")
    return Check(
        name,
        f"mean {mean:.1e}, p99 {p99:.1e}, max {maximum:.1e} nats over {difference_N.size:,} tokens",
        f"mean {tolerance.mean:.1e}, {of} {tolerance.maximum:.1e} ({dtype})",
        # Written so that NaN fails.
        ok=bool(mean <= tolerance.mean and outermost <= tolerance.maximum),
        values={
            "tokens": int(difference_N.size), "mean": float(mean), "p99": float(p99), "max": float(maximum),
            "allowed_mean": tolerance.mean, f"allowed_{of}": tolerance.maximum, "temperature": temperature,
        },
    )  # fmt: skip
