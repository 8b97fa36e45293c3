"""What the orchestrator hands to the trainer: trajectories as token ids, packed into micro-batches.

These are plain numpy records, so that the driver builds and packs them without torch. A trajectory is token ids, never
text; every token says whether it is trained, with which logprob the engine sampled it, and under which policy version.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class TrainSample:
    """One scored trajectory of L tokens (prompt and completion together).

    `trained_L[t]` says that token t was sampled by the policy and takes part in the loss; `engine_logprob_L[t]` is the
    engine's logprob of token t given tokens < t (at the run's temperature), 0 where nothing was sampled;
    `version_L[t]` is the policy version that sampled token t, -1 elsewhere.
    """

    sample_id: str
    group_id: int
    environment: str
    token_ids_L: np.ndarray
    trained_L: np.ndarray
    engine_logprob_L: np.ndarray
    version_L: np.ndarray
    reward: float
    advantage: float = 0.0

    @property
    def length(self) -> int:
        return int(self.token_ids_L.shape[0])

    @property
    def num_trained(self) -> int:
        return int(self.trained_L.sum())

    def __post_init__(self) -> None:
        lengths = {a.shape[0] for a in (self.token_ids_L, self.trained_L, self.engine_logprob_L, self.version_L)}
        assert len(lengths) == 1, f"arrays of sample {self.sample_id} differ in length: {lengths}"


@dataclass(slots=True)
class MicroBatch:
    """Samples laid end to end in one row of T tokens, padded to a multiple of `pad_to_multiple_of`.

    `cu_seqlens` (S + 1 offsets, the padding tail is its own segment when there is one) bounds attention;
    `position_ids_T` restarts at 0 in each segment. Targets are aligned with inputs: position t predicts token t + 1 of
    the same segment, so `trained_T[t]`, `engine_logprob_T[t]`, `advantage_T[t]`, `version_T[t]` describe token t
    itself, and the loss reads the prediction made at t - 1. The first token of a segment is never trained.
    `sample_index_T` maps a token to its position in `sample_ids` (-1 for padding).
    """

    token_ids_T: np.ndarray
    position_ids_T: np.ndarray
    trained_T: np.ndarray
    engine_logprob_T: np.ndarray
    advantage_T: np.ndarray
    version_T: np.ndarray
    sample_index_T: np.ndarray
    cu_seqlens: np.ndarray
    sample_ids: list[str] = field(default_factory=list)
    environments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class OptimizerStepBatch:
    """What one rank computes for one optimizer step, with the counts of all ranks that the loss is divided by."""

    micro_batches: list[MicroBatch]
    num_trained_tokens: int
    """Trained tokens of all ranks: the one global denominator of token-mean losses."""
    num_samples: int
    """Samples of all ranks: the denominator of sequence-level losses."""


@dataclass(slots=True)
class StepInput:
    """One training step of one rank: `number_of_minibatches` optimizer steps over the same batch."""

    step: int
    """Training steps finished before this one, from 0."""
    version: int
    """Policy version of the weights that this step starts from."""
    minibatches: list[OptimizerStepBatch]


@dataclass(slots=True)
class Span:
    """A named interval, in seconds of the wall clock (`time.time()`)."""

    name: str
    start: float
    end: float
    rank: int = 0
    micro_batch: int | None = None


@dataclass(slots=True)
class StepResult:
    """What a rank reports of a step. `metrics` are already reduced over all ranks and equal on each."""

    metrics: dict[str, float]
    spans: list[Span]
