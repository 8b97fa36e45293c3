"""The FSDP2 backend: one optimizer, one loss, any number of ranks.

Owns the order of a step: forward and backward passes over this rank's micro-batches, the global gradient norm, the
clipped update, the metrics.

Invariants: backward passes run on the *sum* of token losses. The gradient is multiplied by the clip factor over the
global count in one pass afterwards, so that neither packing nor the number of ranks changes it and half precision does
not underflow. The host waits for the device at most twice per optimizer step, never between forward and backward. Every
backward pass reduces its gradients into shards, so that no full gradient exists between micro-batches. A gradient that
is not finite ends the run before it reaches the weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from telescope.algorithms import get_algorithm
from telescope.algorithms.loss import needs_batch_reference
from telescope.config.memory import reshards_after_forward
from telescope.config.model_source import read_meta_files
from telescope.trainer.attention import choose_kernel
from telescope.trainer.backends import TrainingBackend
from telescope.trainer.backends.fsdp.checkpoint import (
    BackgroundSaver,
    load_training_state,
    training_state,
)
from telescope.trainer.backends.fsdp.sharding import (
    TimedReduceScatter,
    build_sharded_policy,
    compiles_blocks,
    compute_dtype,
    gather_full_tensors,
    local_tensor,
    reshard_all,
    stay_gathered,
)
from telescope.trainer.batch import MicroBatch, OptimizerStepBatch, SampleTokens, Span, tokens_of_samples
from telescope.trainer.hf_folder import CONFIG, with_dtype, write_model_folder
from telescope.trainer.loss import denominator, micro_batch_loss, prepare, to_device
from telescope.trainer.metrics import StepMetrics, environment_names, reduce_max
from telescope.trainer.model import DTYPES, PREFIX, checkpoint_tensors
from telescope.trainer.packing import warm_up_row
from telescope.trainer.timeline import Timeline, timing_metrics
from telescope.weights.plan import TensorMeta

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as in torch's clipping."""

Forward = tuple[MicroBatch, torch.Tensor, torch.Tensor]
"""A micro-batch with the logprobs and the entropies of its N trained tokens."""


class FSDPBackend(TrainingBackend):
    """One rank of an FSDP2 trainer, on CPU (gloo) or GPU (NCCL)."""

    def init(self) -> None:
        config = self.config
        self.algorithm = get_algorithm(config.algorithm)
        self.environments = environment_names(config)
        self.mesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("data",))
        self.policy = build_sharded_policy(config, self.mesh, self.device)
        self.compiles = compiles_blocks(config, self.policy, self.device)
        self.parameters = list(self.policy.parameters())
        # Weight decay is for matrices; norms and biases should not be pulled to 0.
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, fused=True)
        self.kernel = choose_kernel(self.device, compute_dtype(config), self.policy.head_dim)
        self.loss_dtype = torch.float64 if compute_dtype(config) == torch.float64 else torch.float32
        self.reduction = TimedReduceScatter()
        self.reduction.measure(self.policy)
        self._keeps_gathered = not reshards_after_forward(config.fsdp_reshard_after_forward, self.device.type)
        self._spans: list[Span] = []
        self._tokens: list[SampleTokens] = []
        if self.config.checkpoint_every:
            _ = self.saver  # its process starts meanwhile

    def warm_up(self) -> None:
        on_gpu = self.device.type == "cuda"
        stay_gathered(self.policy, False)
        row = warm_up_row(self.config.seq_len, self.config.pad_to_multiple_of, self.policy.head.weight.shape[0])
        rows = to_device(prepare(row, 0), self.device, self.kernel, self.loss_dtype)
        # Without a loss: a user's algorithm may count its calls.
        with torch.random.fork_rng([self.device] if on_gpu else []):
            logp_N, entropy_N = self.policy(
                rows.token_ids_T, rows.position_ids_T, rows.layout, rows.predicted_N,
                self.config.temperature, Timeline(self.device, self.rank, enabled=False),
            )  # fmt: skip
            (logp_N.sum() + entropy_N.sum()).backward()
        self.policy.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize(self.device)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def train_step(self, trainer_data: dict[str, Any]) -> dict[str, float]:
        step, version = int(trainer_data["step"]), int(trainer_data["version"])
        minibatches: list[OptimizerStepBatch] = trainer_data["minibatches"]
        rate = self.learning_rate(step)
        timeline = Timeline(self.device, self.rank)
        sums = StepMetrics(self.device, self.environments)
        norms = []
        recorded: frozenset[str] = trainer_data.get("recorded", frozenset())
        forwards: list[Forward] | None = [] if recorded else None
        references = self.reference_logprobs(minibatches, version, timeline)
        for index, batch in enumerate(minibatches):
            self.accumulate(
                batch, version, timeline, sums,
                weights_moved=index > 0, references=references[index], forwards=forwards,
            )  # fmt: skip
            norms.append(self.update(rate, denominator(self.algorithm, batch, self.config), step, timeline))
        metrics = sums.reduce()
        for row, logp_N, entropy_N in forwards or ():  # the device has finished: no wait
            if not recorded.isdisjoint(row.sample_ids):
                logprobs, entropies = (values.float().cpu().numpy() for values in (logp_N, entropy_N))
                self._tokens += tokens_of_samples(row, recorded, logprobs, entropies)
        spans = timeline.finish()
        if self.config.track_gpu_events:
            self._spans += spans
        num_micro_batches = sum(len(batch.micro_batches) for batch in minibatches)
        metrics |= reduce_max(timing_metrics(spans, num_micro_batches), self.device)
        metrics |= {
            "grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "learning_rate": rate,
            "optimizer_steps": float(len(norms)),
            "micro_batches": float(num_micro_batches),
        }
        return metrics

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of training step `step`."""
        config = self.config
        return learning_rate(
            step,
            base=config.learning_rate,
            schedule=config.lr_scheduler,
            warmup_steps=config.warmup_steps,
            total_steps=config.number_of_steps,
            min_ratio=config.min_lr_ratio,
        )

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
        """Adds the gradient of the *sum* of this rank's token losses to `grad`. Collective.

        `references` are the logprobs of each micro-batch from before the first update of the batch, if the loss has a
        ratio to them and the weights have changed since. `forwards` receives the results of each forward pass.
        """
        divisor = denominator(self.algorithm, batch, self.config)
        penalty_share = divisor / max(batch.num_trained_tokens, 1)
        for index, micro_batch in enumerate(batch.micro_batches):
            # Weights do not change until the update.
            stay_gathered(self.policy, self._keeps_gathered and index + 1 < len(batch.micro_batches))
            with timeline.span("prepare_tensors", index):
                host = prepare(micro_batch, version, self.environments)
            with timeline.span("data_to_device", index):
                rows = to_device(host, self.device, self.kernel, self.loss_dtype)
            logp_N, entropy_N = self.policy(
                rows.token_ids_T, rows.position_ids_T, rows.layout, rows.predicted_N,
                self.config.temperature, timeline, index,
            )  # fmt: skip
            if forwards is not None:
                forwards.append((micro_batch, logp_N.detach(), entropy_N.detach()))
            with timeline.span("loss_computation", index):
                loss, terms = micro_batch_loss(
                    self.algorithm, rows, logp_N, entropy_N, self.config,
                    reference_N=references[index] if references is not None else None, penalty_share=penalty_share,
                )  # fmt: skip
            with timeline.span("backward", index), self.reduction.during(timeline, index):
                loss.backward()
            with timeline.span("compute_kl", index):
                sums.add(
                    rows, logp_N, entropy_N, terms,
                    scale=1.0 / divisor, penalty_scale=penalty_share / divisor, weights_moved=weights_moved,
                )  # fmt: skip

    @torch.no_grad()
    def reference_logprobs(
        self, minibatches: list[OptimizerStepBatch], version: int, timeline: Timeline
    ) -> list[list[torch.Tensor] | None]:
        """Computes this rank's logprobs under the batch's first weights, by step and micro-batch.

        None if the loss has no ratio to them, and for the first optimizer step, whose own forward pass computes the
        same numbers. Collective.
        """
        if len(minibatches) < 2 or not needs_batch_reference(self.config):
            return [None] * len(minibatches)
        references: list[list[torch.Tensor] | None] = [None]
        with timeline.span("reference_logprobs"):
            for batch in minibatches[1:]:
                references.append([self.forward_logprobs(row, version) for row in batch.micro_batches])
            reshard_all(self.policy)
        return references

    def forward_logprobs(self, micro_batch: MicroBatch, version: int, temperature: float | None = None) -> torch.Tensor:
        """Computes logprobs of a row's trained tokens at `temperature`, by default the run's. Collective."""
        rows = to_device(prepare(micro_batch, version), self.device, self.kernel, self.loss_dtype)
        logp_N, _ = self.policy(
            rows.token_ids_T, rows.position_ids_T, rows.layout, rows.predicted_N,
            self.config.temperature if temperature is None else temperature,
            Timeline(self.device, self.rank, enabled=False),
        )  # fmt: skip
        assert isinstance(logp_N, torch.Tensor)
        return logp_N

    @torch.no_grad()
    def update(self, rate: float, divisor: float, step: int, timeline: Timeline) -> float:
        """Divides and clips the gradient, takes one AdamW step and frees the gradient. Returns its norm. Collective."""
        with timeline.span("gradient_norm"):
            gradients = self.local_gradients()
            norm = self.gradient_norm(gradients) / divisor
        with timeline.span("optimizer"):
            if not math.isfinite(norm):
                raise FloatingPointError(
                    f"the gradient of training step {step} is not finite (norm {norm}); weights were not changed. "
                    f"mixed_precision_dtype is {self.config.mixed_precision_dtype}, learning_rate {rate:g}"
                )
            bound = self.config.grad_clip or math.inf  # 0 switches clipping off
            clip = min(1.0, bound / (norm + CLIP_EPSILON))
            torch._foreach_mul_(gradients, clip / divisor)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return norm

    def local_gradients(self) -> list[torch.Tensor]:
        """Returns this rank's non-empty gradient shards."""
        shards = [local_tensor(p.grad) for p in self.parameters if p.grad is not None]
        return [shard for shard in shards if shard.numel() > 0]

    def gradient_norm(self, local_gradients: list[torch.Tensor]) -> float:
        """Computes the L2 norm over all parameters of all ranks. Collective; waits for the device."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        if local_gradients:
            squares += torch.stack(torch._foreach_norm(local_gradients)).double().square().sum()
        dist.all_reduce(squares)
        return math.sqrt(float(squares))

    @torch.no_grad()
    def sequence_logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        logp_N = self.forward_logprobs(_single_row(token_ids), 0, temperature)
        reshard_all(self.policy)
        return logp_N.tolist()

    @torch.no_grad()
    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        # Shards are cast before gathering: half the bytes and half the memory.
        for name, tensor in gather_full_tensors(self._named_tensors(), dtype):
            yield from checkpoint_tensors(name, tensor.detach())

    def weight_metadata(self) -> list[TensorMeta]:
        return [
            TensorMeta(part, tuple(shape.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._named_tensors()
            for part, shape in checkpoint_tensors(name, torch.empty(tensor.shape, device="meta"))
        ]

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.policy.named_parameters():
            yield name.removeprefix(PREFIX), parameter
        persistent = self.policy.state_dict().keys()
        for name, buffer in self.policy.named_buffers():
            if name in persistent:
                yield name.removeprefix(PREFIX), buffer

    @functools.cached_property
    def saver(self) -> BackgroundSaver:
        """Writes checkpoints; kept when the weights are loaded again."""
        return BackgroundSaver(self.device, self.store_address)

    def save_checkpoint(self, step: int, directory: Path) -> None:
        optimizer = self.optimizer if self.config.checkpoint_save_training_state else None
        self.saver.start(training_state(self.policy, optimizer), directory)

    def finish_checkpoint(self) -> None:
        self.saver.wait()

    def close(self) -> None:
        if "saver" in vars(self):
            self.saver.close()

    def load_checkpoint(self, step: int, directory: Path) -> None:
        load_training_state(self.policy, self.optimizer, directory)

    def save_hf(self, directory: Path) -> None:
        dtype = self.config.model_dtype
        weights = self.named_weights(DTYPES[dtype])
        error: OSError | None = None
        if self.rank == 0:
            metas = [replace(meta, dtype=dtype) for meta in self.weight_metadata()]
            loaded = self.policy.causal_lm.config.to_json_string().encode()  # for a model folder that is gone
            try:
                files = with_dtype({CONFIG: loaded, **read_meta_files(self.config)}, dtype)
                write_model_folder(directory, metas, weights, files)
            except OSError as caught:
                error = caught  # raised below: the other ranks gather the rest
        for _ in weights:
            continue
        dist.barrier()
        if error is not None:
            raise error

    def take_spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    def take_tokens(self) -> list[SampleTokens]:
        tokens, self._tokens = self._tokens, []
        return tokens


def _single_row(token_ids: list[int]) -> MicroBatch:
    """Makes a row of one sequence in which every token except the first is predicted."""
    import numpy as np

    size = len(token_ids)
    trained_T = np.ones(size, dtype=bool)
    trained_T[0] = False
    return MicroBatch(
        token_ids_T=np.array(token_ids, dtype=np.int64),
        position_ids_T=np.arange(size),
        trained_T=trained_T,
        engine_logprob_T=np.zeros(size),
        advantage_T=np.zeros(size),
        version_T=np.zeros(size, dtype=np.int32),
        sample_index_T=np.zeros(size, dtype=np.int32),
        cu_seqlens=np.array([0, size], dtype=np.int32),
        sample_ids=["probe"],
        environments=["probe"],
    )


def learning_rate(
    step: int, *, base: float, schedule: str, warmup_steps: int, total_steps: int, min_ratio: float
) -> float:
    """Computes the rate of training step `step`, counted from 0.

    `none` ignores the warm-up; `constant` warms up and stays; `linear` and `cosine` warm up, then decay from `base` at
    step `warmup_steps` to `base * min_ratio`, which they would reach at step `total_steps`. A pure function: there is
    no scheduler to save or to lose at a resume, and no step has a rate of 0.
    """
    if schedule == "none":
        return base
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if schedule == "constant":
        return base
    decay_steps = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    remaining = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return base * (min_ratio + (1.0 - min_ratio) * remaining)
