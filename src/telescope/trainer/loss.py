"""Computes the loss of a micro-batch as the sum of its token losses.

Owns the tensors that an algorithm reads, and the denominator. Does not own the formulas (`telescope.algorithms`).
Invariant: a micro-batch contributes a sum over its trained tokens, never a mean, so that packing, splitting and ranks
do not change the weight of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from telescope.algorithms import Algorithm, TokenBatch
from telescope.algorithms.loss import LossTerms, loss_terms, needs_batch_reference
from telescope.trainer.batch import MicroBatch, OptimizerStepBatch
from telescope.trainer.model_input import move


@dataclass(slots=True)
class DeviceMicroBatch:
    """The tensors of a row's N trained tokens that loss and metrics read."""

    engine_logprob_N: torch.Tensor
    advantage_N: torch.Tensor
    sample_N: torch.Tensor
    age_N: torch.Tensor
    """Policy version of the step minus the version that sampled the token."""
    on_policy_N: torch.Tensor
    """1 for tokens of samples that the step's policy version sampled entirely, else 0."""
    environment_N: torch.Tensor
    """Index of the token's environment in the list given to `prepare`, or the list's length for other environments."""
    num_samples: int


@dataclass(slots=True)
class HostMicroBatch:
    """The host-side numpy arrays of a `DeviceMicroBatch`."""

    source: MicroBatch
    predicted_N: np.ndarray
    age_N: np.ndarray
    on_policy_N: np.ndarray
    environment_N: np.ndarray


def prepare(micro_batch: MicroBatch, version: int, environments: Sequence[str] = ()) -> HostMicroBatch:
    """Selects the trained tokens, their ages and their environments."""
    predicted_N = np.flatnonzero(micro_batch.trained_T)
    age_N = version - micro_batch.version_T[predicted_N]
    sample_N = micro_batch.sample_index_T[predicted_N]
    is_stale = np.zeros(len(micro_batch.sample_ids), dtype=bool)
    is_stale[sample_N[age_N != 0]] = True
    place = {name: index for index, name in enumerate(environments)}
    environment_S = np.array([place.get(name, len(place)) for name in micro_batch.environments], dtype=np.int64)
    return HostMicroBatch(micro_batch, predicted_N, age_N, ~is_stale[sample_N], environment_S[sample_N])


def to_device(host: HostMicroBatch, device: torch.device, float_dtype: torch.dtype) -> DeviceMicroBatch:
    """Copies a prepared micro-batch to the device with `move`."""
    source, predicted_N = host.source, host.predicted_N
    return DeviceMicroBatch(
        engine_logprob_N=move(source.engine_logprob_T[predicted_N], float_dtype, device),
        advantage_N=move(source.advantage_T[predicted_N], float_dtype, device),
        sample_N=move(source.sample_index_T[predicted_N], torch.int64, device),
        age_N=move(host.age_N, float_dtype, device),
        on_policy_N=move(host.on_policy_N, float_dtype, device),
        environment_N=move(host.environment_N, torch.int64, device),
        num_samples=len(source.sample_ids),
    )


def denominator(algorithm: Algorithm, batch: OptimizerStepBatch, config: Any) -> float:
    """Returns the divisor of an optimizer step's loss, equal on all ranks."""
    kind = algorithm.denominator(config)
    if kind == "tokens":
        return float(batch.num_trained_tokens)
    if kind == "samples":
        return float(batch.num_samples)
    return float(batch.num_samples * config.max_tokens)


def micro_batch_loss(
    algorithm: Algorithm,
    batch: DeviceMicroBatch,
    logp_N: torch.Tensor,
    entropy_N: torch.Tensor,
    config: Any,
    *,
    reference_N: torch.Tensor | None = None,
    penalty_share: float = 1.0,
) -> tuple[torch.Tensor, LossTerms]:
    """Sums the token losses of one micro-batch, with gradient. The sum is zero without tokens.

    `reference_N` are the trainer's logprobs from before the first update of the batch, if the configuration needs them.
    None means that the weights have not changed since. `penalty_share` is the step's denominator over its trained
    tokens, so that penalties are means over tokens after the division.
    """
    if not needs_batch_reference(config):
        reference_N = batch.engine_logprob_N
    elif reference_N is None:
        reference_N = logp_N.detach()
    tokens = TokenBatch(
        logp_N=logp_N,
        entropy_N=entropy_N,
        engine_logp_N=batch.engine_logprob_N,
        ref_logp_N=reference_N,
        advantage_N=batch.advantage_N,
        sample_N=batch.sample_N,
        num_samples=batch.num_samples,
    )
    terms = loss_terms(algorithm, tokens, config)
    total = terms.policy_N.sum()
    if terms.penalty_N is not None:
        total = total + penalty_share * terms.penalty_N.sum()
    return total, terms
