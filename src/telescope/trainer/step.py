"""Implements the RL step for all backends.

Owns the order of a training step: reference logprobs, optimizer steps, loss, learning rate, metrics, timeline. Does not
own the model: a backend has `forward_backward`, `forward_logprobs` and `optimizer_step`, and its `layout`.

Invariants: backward passes run on the *sum* of token losses. The gradient is divided by the global count afterwards, so
that neither packing nor the number of ranks changes it and half precision does not underflow. The loss of a row is
computed from the logprobs of all of its trained tokens, on every rank that has them, so that neither algorithms nor
metrics depend on how ranks share a row. A gradient that is not finite ends the run before it reaches the weights.
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from telescope.algorithms import get_algorithm
from telescope.algorithms.loss import needs_batch_reference
from telescope.config.model_source import read_meta_files
from telescope.trainer.backends import TrainingBackend
from telescope.trainer.batch import MicroBatch, OptimizerStepBatch, SampleTokens, tokens_of_samples
from telescope.trainer.first_rollouts import FirstRollouts
from telescope.trainer.hf_folder import CONFIG, with_dtype, write_model_folder
from telescope.trainer.loss import denominator, micro_batch_loss, prepare, to_device
from telescope.trainer.metrics import REFERENCE, StepMetrics, environment_names, reduce_timing, timing_metrics
from telescope.trainer.model import compute_dtype
from telescope.trainer.packing import lay_out, untrained_sample, warm_up_row
from telescope.trainer.router_replay import RouterReplay
from telescope.utils.timeline import Span, Timeline

RowLoss = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(index of the micro-batch, logprob [N], entropy [N]) -> the sum of its token losses, a scalar with gradient.

N counts all trained tokens of the row, in its order. Called once for each micro-batch, on every rank that has the
numbers, which includes each rank that reports (`Layout.reports`)."""

Forward = tuple[MicroBatch, torch.Tensor, torch.Tensor]
"""A micro-batch with the logprobs and the entropies of its N trained tokens."""


class GradientPart(NamedTuple):
    """A part of a gradient: this rank's `shards`, together with those of all ranks of `group` (None for all ranks)."""

    shards: list[torch.Tensor]
    group: dist.ProcessGroup | None


class RLBackend(TrainingBackend):
    """A backend that trains with the RL step. Subclasses add the model, its passes and its optimizer."""

    hf_config: PretrainedConfig
    """The model's config. Set by `init`."""

    def init(self) -> None:
        """Prepares the step. A subclass calls it before it loads its model."""
        self.algorithm = get_algorithm(self.config.algorithm)
        self.environments = environment_names(self.config)
        self.loss_dtype = torch.float64 if compute_dtype(self.config) == torch.float64 else torch.float32
        self.replay = RouterReplay(self.device) if self.config.router_replay else None
        """Chooses experts. The backend adds it to its model."""
        self._spans: list[Span] = []
        self._tokens: list[SampleTokens] = []

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: RowLoss, timeline: Timeline) -> None:
        """Adds the gradient of the micro-batches' summed `loss`. Collective. The sum is over all data ranks.

        All ranks have the same number of micro-batches. If several ranks compute the loss of one row, they compute the
        same loss, and its gradient counts once. Spans of `timeline` have names from `trainer.metrics.OPERATIONS`.
        """

    @abstractmethod
    def forward_logprobs(
        self, micro_batches: Sequence[MicroBatch], temperature: float | None = None
    ) -> list[torch.Tensor]:
        """Computes logprobs of each row's N trained tokens, on every rank that gets the row. Collective. No gradients.

        The default temperature is the run's.
        """

    @abstractmethod
    def optimizer_step(self, rate: float, divisor: float, timeline: Timeline) -> float:
        """Divides and clips the gradient and takes an AdamW step. Collective. Frees the gradient.

        Returns the L2 norm of the divided gradient over all parameters, before clipping. If it is not finite, weights
        and optimizer do not change.
        """

    @abstractmethod
    def take_gradient(self, divisor: float) -> list[GradientPart]:
        """Returns the divided gradient, for `telescope verify`, and frees it. Collective.

        Equal divisions of the model have the same number of parts and shards.
        """

    def clip_factor(self, norm: float) -> float:
        """Returns the factor that clips a gradient of this norm, in (0, 1]."""
        bound = self.config.grad_clip or math.inf  # 0 disables clipping
        return min(1.0, bound / (norm + 1e-6))  # as `torch.nn.utils.clip_grad_norm_`

    @abstractmethod
    def drop_gradient(self) -> None:
        """Frees the gradient without using it."""

    def warm_up(self) -> None:
        row = warm_up_row(
            self.config.seq_len, self.config.pad_to_multiple_of, self.hf_config.get_text_config().vocab_size
        )
        on_gpu = self.device.type == "cuda"
        # Without the algorithm's loss, because a user's may count its calls.
        with torch.random.fork_rng([self.device] if on_gpu else []):
            self.forward_backward([row], lambda _, logp_N, entropy_N: logp_N.sum() + entropy_N.sum(), self.unmeasured())
        self.drop_gradient()
        if self.replay is not None:
            self.replay.metrics()  # forgets its counts
        if on_gpu:
            torch.cuda.synchronize(self.device)

    def unmeasured(self) -> Timeline:
        """Returns a timeline that records nothing."""
        return Timeline(self.device, self.rank, enabled=False)

    def train_step(self, trainer_data: dict[str, Any]) -> dict[str, float]:
        step, version = int(trainer_data["step"]), int(trainer_data["version"])
        minibatches: list[OptimizerStepBatch] = trainer_data["minibatches"]
        rate = learning_rate(step, self.config)
        timeline = Timeline(self.device, self.rank)
        sums = StepMetrics(self.device, self.environments)
        norms = []
        recorded: frozenset[str] = trainer_data.get("recorded", frozenset())
        forwards: list[Forward] | None = [] if recorded and self.layout.reports else None
        references = self.reference_logprobs(minibatches, timeline)
        for index, batch in enumerate(minibatches):
            self.accumulate(
                batch, version, timeline, sums,
                weights_moved=index > 0, references=references[index], forwards=forwards,
            )  # fmt: skip
            if index == 0:
                self.first_rollouts.check()
            norm = self.optimizer_step(rate, denominator(self.algorithm, batch, self.config), timeline)
            if not math.isfinite(norm):
                raise FloatingPointError(
                    f"the gradient of training step {step} is not finite (norm {norm}); weights were not changed. "
                    f"mixed_precision_dtype is {self.config.mixed_precision_dtype}, learning_rate {rate:g}"
                )
            norms.append(norm)
        metrics = sums.reduce() | {"mismatch/logprob_difference_allowed": self.first_rollouts.allowed}
        if self.replay is not None:
            metrics |= self.replay.metrics()
        for row, logp_N, entropy_N in forwards or ():  # the device has finished, so this does not wait
            if not recorded.isdisjoint(row.sample_ids):
                logprobs, entropies = (values.float().cpu().numpy() for values in (logp_N, entropy_N))
                self._tokens += tokens_of_samples(row, recorded, logprobs, entropies)
        spans = timeline.finish()
        if self.config.track_gpu_events:
            self._spans += spans
        num_micro_batches = sum(len(batch.micro_batches) for batch in minibatches)
        metrics |= reduce_timing(timing_metrics(spans, num_micro_batches), self.device)
        metrics |= {
            "grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "learning_rate": rate,
            "optimizer_steps": float(len(norms)),
            "micro_batches": float(num_micro_batches),
        }
        return metrics

    @functools.cached_property
    def first_rollouts(self) -> FirstRollouts:
        """The comparison of the engine with this trainer in the first steps."""
        return FirstRollouts(self.config, self.hf_config.get_text_config(), self.device)

    def accumulate(
        self,
        batch: OptimizerStepBatch,
        version: int,
        timeline: Timeline,
        sums: StepMetrics,
        *,
        weights_moved: bool = False,
        references: list[torch.Tensor] | None = None,
        forwards: list[Forward] | None = None,
    ) -> None:
        """Adds the gradient of an optimizer step's *summed* token losses. Collective. It is not yet divided.

        `references` are the logprobs of each micro-batch from before the first update of the batch, if the loss has a
        ratio to them and the weights have changed since. The results of each forward pass are appended to `forwards`.
        """
        divisor = denominator(self.algorithm, batch, self.config)
        penalty_share = divisor / max(batch.num_trained_tokens, 1)

        def loss(index: int, logp_N: torch.Tensor, entropy_N: torch.Tensor) -> torch.Tensor:
            micro_batch = batch.micro_batches[index]
            with timeline.span("prepare_tensors", index):
                host = prepare(micro_batch, version, self.environments)
            with timeline.span("data_to_device", index):
                rows = to_device(host, self.device, self.loss_dtype)
            if forwards is not None:
                forwards.append((micro_batch, logp_N.detach(), entropy_N.detach()))
            with timeline.span("loss_computation", index):
                total, terms = micro_batch_loss(
                    self.algorithm, rows, logp_N, entropy_N, self.config,
                    reference_N=references[index] if references is not None else None, penalty_share=penalty_share,
                )  # fmt: skip
            if not weights_moved and self.layout.reports:
                self.first_rollouts.add(host, logp_N, rows.engine_logprob_N)
            with timeline.span("compute_kl", index):
                sums.add(
                    rows, logp_N, entropy_N, terms,
                    scale=1.0 / divisor, penalty_scale=penalty_share / divisor, weights_moved=weights_moved,
                    counts=self.layout.reports,
                )  # fmt: skip
            return total

        self.forward_backward(batch.micro_batches, loss, timeline)

    def reference_logprobs(
        self, minibatches: Sequence[OptimizerStepBatch], timeline: Timeline
    ) -> list[list[torch.Tensor] | None]:
        """Computes logprobs under the batch's first weights. Collective.

        Covers this rank's rows, by step and micro-batch. None if the loss has no ratio to them, and for the
        first optimizer step, whose own forward pass computes the same numbers.
        """
        if len(minibatches) < 2 or not needs_batch_reference(self.config):
            return [None] * len(minibatches)
        later = minibatches[1:]
        with timeline.span(REFERENCE):
            logprobs = iter(self.forward_logprobs([row for batch in later for row in batch.micro_batches]))
        return [None, *([next(logprobs) for _ in batch.micro_batches] for batch in later)]

    def save_hf(self, directory: Path) -> None:
        dtype = self.config.model_dtype
        weights = self.named_weights(getattr(torch, dtype))
        error: OSError | None = None
        if self.rank == 0:
            metas = [meta if meta.exact else replace(meta, dtype=dtype) for meta in self.weight_metadata()]
            loaded = self.hf_config.to_json_string().encode()  # for a model folder that no longer exists
            try:
                files = with_dtype({CONFIG: loaded, **read_meta_files(self.config)}, dtype)
                write_model_folder(directory, metas, weights, files, origin=self.origin)
            except OSError as caught:
                error = caught  # raised below, because the other ranks gather the rest
        for _ in weights:
            continue
        dist.barrier()
        if error is not None:
            raise error

    def sequence_logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        row = lay_out([untrained_sample("probe", np.array(token_ids))])
        (logp_N,) = self.forward_logprobs([row], temperature)
        return logp_N.tolist()

    def take_spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    def take_tokens(self) -> list[SampleTokens]:
        tokens, self._tokens = self._tokens, []
        return tokens


def learning_rate(step: int, config: Any) -> float:
    """Computes the learning rate of training step `step`, counted from 0, from the fields of a run.

    `none` ignores the warm-up; `constant` warms up and stays; `linear` and `cosine` warm up, then decay from
    `learning_rate` at step `warmup_steps` to `min_lr_ratio` of it, which they would reach at `number_of_steps`. A pure
    function, so there is no scheduler to save or to lose when a run resumes. No step has a rate of 0.
    """
    base: float = config.learning_rate
    schedule, warmup_steps, min_ratio = config.lr_scheduler, config.warmup_steps, config.min_lr_ratio
    if schedule == "none":
        return base
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if schedule == "constant":
        return base
    decay_steps = max(1, config.number_of_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    remaining = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return base * (min_ratio + (1.0 - min_ratio) * remaining)
