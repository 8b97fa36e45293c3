"""Defines input and output of a training step, and the ranks' layout.

All records are numpy, so that the driver builds, packs and distributes them without torch. A trajectory is token ids,
never text. Every token has a flag whether it is trained, the engine's logprob, and the policy version that sampled it.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from telescope.errors import ConfigError
from telescope.utils.timeline import Span


@dataclass(slots=True)
class TrainSample:
    """One scored trajectory of L tokens (prompt and completion together).

    `trained_L[t]`: token t was sampled by the policy and is in the loss. `engine_logprob_L[t]`: the engine's logprob of
    token t given tokens < t at the run's temperature, 0 for tokens that were not sampled. `version_L[t]`: the policy
    version that sampled token t, -1 elsewhere.
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
    routes_LXK: np.ndarray | None = None
    """The engine's K experts of each token in each of X layers, uint8 or uint16 (`router_replay`). A token has no
    recorded routes if its K experts are not all different."""
    payload: Any = None
    """Data of the tokens besides their ids, such as images. Only a model's input uses it, and none does yet."""
    chat: str = ""
    """Name of the sample's conversation in the rollout."""

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
    """Samples concatenated in one row of T tokens, with padding. T is a multiple of `pad_to_multiple_of`.

    `cu_seqlens` (S + 1 offsets, padding at the end is a separate segment) bounds attention; `position_ids_T` restarts
    at 0 in each segment. `trained_T[t]`, `engine_logprob_T[t]`, `advantage_T[t]` and `version_T[t]` describe token t,
    which position t - 1 predicts. The first token of a segment is never trained. `sample_index_T` maps a token to its
    position in `sample_ids` (-1 for padding).
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
    routes_TXK: np.ndarray | None = None
    """As in `TrainSample`. None if no sample of the row has routes."""
    payloads: list[Any] = field(default_factory=list)
    """`TrainSample.payload` of each sample, in the order of `sample_ids`."""


@dataclass(slots=True)
class OptimizerStepBatch:
    """One optimizer step of one rank, with the loss's global counts."""

    micro_batches: list[MicroBatch]
    num_trained_tokens: int
    """Trained tokens of all ranks, the denominator of token-mean losses."""
    num_samples: int
    """Samples of all ranks, the denominator of sequence-level losses."""


@dataclass(slots=True)
class StepInput:
    """One training step of one rank, with `number_of_minibatches` optimizer steps over the same batch."""

    step: int
    """Training steps finished before this one, from 0."""
    version: int
    """Policy version of the weights at the start of this step."""
    minibatches: list[OptimizerStepBatch]
    recorded: frozenset[str] = frozenset()
    """Ids of training samples whose tokens are returned in `StepResult.tokens`."""


@dataclass(slots=True)
class SampleTokens:
    """The L tokens of a sample, as engine and trainer computed them.

    The trainer's numbers come from the forward pass that trained the token, and are NaN for untrained tokens. The
    others are as in `TrainSample`.
    """

    sample_id: str
    token_ids_L: np.ndarray
    trained_L: np.ndarray
    engine_logprob_L: np.ndarray
    version_L: np.ndarray
    trainer_logprob_L: np.ndarray
    entropy_L: np.ndarray


def tokens_of_samples(
    batch: MicroBatch, chosen: frozenset[str], trainer_logprob_N: np.ndarray, entropy_N: np.ndarray
) -> list[SampleTokens]:
    """Returns the tokens of the chosen samples of a micro-batch. The arrays cover its N trained tokens."""
    trainer_T, entropy_T = (np.full(len(batch.trained_T), np.nan, dtype=np.float32) for _ in range(2))
    trainer_T[batch.trained_T], entropy_T[batch.trained_T] = trainer_logprob_N, entropy_N
    found = []
    for index, sample_id in enumerate(batch.sample_ids):
        if sample_id in chosen:
            own = batch.sample_index_T == index
            arrays = batch.token_ids_T, batch.trained_T, batch.engine_logprob_T, batch.version_T, trainer_T, entropy_T
            found.append(SampleTokens(sample_id, *(array[own] for array in arrays)))
    return found


@dataclass(slots=True)
class StepResult:
    """Result of a step on one rank. `metrics` are reduced over all ranks and equal on each."""

    metrics: dict[str, float]
    spans: list[Span]
    tokens: list[SampleTokens] = field(default_factory=list)
    """Tokens of the samples in `StepInput.recorded` that this rank trained."""


COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
"""Limit for one collective, longer than loading a model from a slow disk."""


@dataclass(slots=True, frozen=True)
class Layout:
    """The place of one rank among all ranks, which determines the share of a batch that the rank trains.

    With model parallelism several ranks work on the same rows. Together they are one data-parallel rank.
    """

    data_rank: int
    """The share of a batch that this rank trains. Ranks with the same value get the same rows."""
    data_size: int
    """Number of shares, equal on all ranks."""
    reports: bool = True
    """Whether this rank adds its rows to the metrics and returns recorded tokens. For each data rank, this is exactly
    one rank that has the logprobs."""
    sends_weights: bool = True
    """Whether `named_weights` yields full tensors on this rank. Must be True on rank 0. If False, only names and shapes
    must be correct."""
    packs: bool = True
    """Whether the samples of a micro-batch share a row. Otherwise each has its own row, padded to the longest."""

    @classmethod
    def of_neighbors(cls, rank: int, world_size: int, model_size: int, *, packs: bool = True) -> Layout:
        """Returns the layout in which `model_size` consecutive ranks share rows."""
        return cls(rank // model_size, world_size // model_size, reports=rank % model_size == 0, packs=packs)


@dataclass(slots=True, frozen=True)
class TrainerInfo:
    """Properties of a rank that is ready."""

    device: str
    config_hash: str
    compiles: bool
    """Whether `warm_up` has something to do."""
    layout: Layout


def check_layouts(layouts: Sequence[Layout]) -> None:
    """Checks the layouts of all ranks, in order of the ranks. Raises `ConfigError` for a backend's mistake."""
    size = layouts[0].data_size
    reporting = sorted(layout.data_rank for layout in layouts if layout.reports)
    problem = None
    if any(layout.data_size != size for layout in layouts):
        problem = f"data_size differs between ranks: {[layout.data_size for layout in layouts]}"
    elif any(not 0 <= layout.data_rank < size for layout in layouts):
        problem = f"data_rank is not in [0, {size}) on every rank: {[layout.data_rank for layout in layouts]}"
    elif reporting != list(range(size)):
        problem = f"one rank must report for each of {size} data ranks, and those that report have {reporting}"
    elif not layouts[0].sends_weights:
        problem = "rank 0 does not send weights"
    if problem is not None:
        raise ConfigError(f"train_backend: the backend's layout is wrong: {problem}. Correct its `layout`")
