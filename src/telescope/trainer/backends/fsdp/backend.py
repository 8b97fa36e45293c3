"""Implements the FSDP2 backend, in which each rank has a shard of every weight.

With `fsdp_context_parallel_size` C, every C neighbors share the rows of one data-parallel rank (`sequence_exchange`).
Weights are sharded over all ranks, and gradients are summed over all ranks.

Owns the passes over this rank's micro-batches, the global gradient norm, the clipped update, and the order of
gathering. The RL step is in `trainer.step`.

Invariants: the host waits for the device at most twice per optimizer step, never between forward and backward. Every
backward pass reduces its gradients into shards, so that no full gradient exists between micro-batches.
"""

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from telescope.config.memory import reshards_after_forward
from telescope.config.model_shape import uneven_heads
from telescope.errors import UserError
from telescope.trainer.backends.fsdp import sharding
from telescope.trainer.backends.fsdp.checkpoint import BackgroundSaver, load_training_state, training_state
from telescope.trainer.batch import COLLECTIVE_TIMEOUT, Layout, MicroBatch
from telescope.trainer.checkpoint_names import named_tensors
from telescope.trainer.lora import adapter_tensors, config_of_adapter, is_adapter, set_dropout, write_adapter
from telescope.trainer.model import PREFIX, compute_dtype
from telescope.trainer.model_input import model_input
from telescope.trainer.router_replay import replay_in_transformers
from telescope.trainer.sequence_exchange import ContextGroup, whole_row
from telescope.trainer.step import GradientPart, RLBackend, RowLoss
from telescope.utils.timeline import Timeline
from telescope.weights.plan import TensorMeta

logger = logging.getLogger(__name__)


class FSDPBackend(RLBackend):
    """One rank of an FSDP2 trainer, on CPU (gloo) or GPU (NCCL)."""

    def init(self) -> None:
        super().init()
        config = self.config
        self.mesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("data",))
        context = self.context
        self.policy = sharding.build_sharded_policy(config, self.mesh, self.device)
        self.hf_config = self.policy.causal_lm.config
        if context is not None:
            self._refuse_uneven_heads(context.size)
        if not self.policy.packs and (context is not None or self.replay is not None):
            field = "router_replay" if context is None else "fsdp_context_parallel_size"
            raise UserError(
                f"{field} is set, but samples of {config.model} cannot share a row, which it needs: they are computed "
                f"side by side. Leave {field} at its default"
            )
        if self.replay is not None:
            replay_in_transformers(self.policy.layers, self.replay)
        self.compiles = sharding.compiles_blocks(config, self.policy, self.device)
        self.parameters = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        """Trained parameters, which with LoRA are only the adapters."""
        # Weight decay is only for matrices; norms and biases should not be pulled to 0.
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, fused=True)
        self.kernel = sharding.kernel_of(self.policy, compute_dtype(config), self.device)
        self.reduction = sharding.TimedReduceScatter()
        for unit in sharding.units(self.policy):
            unit.set_custom_reduce_scatter(self.reduction)
        self._keeps_gathered = not reshards_after_forward(config.fsdp_reshard_after_forward, self.device.type)
        if self.config.checkpoint_every:
            self._prepare_checkpoints()

    def _refuse_uneven_heads(self, num_ranks: int) -> None:
        """Raises `UserError` if ranks cannot share the heads, whose number may be unknown before the start."""
        model = self.hf_config.get_text_config()
        for layer in getattr(model, "per_layer_config", [model]):  # Gemma 4 has layers with other numbers of heads
            num_kv_heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
            if heads := uneven_heads(num_ranks, layer.num_attention_heads, num_kv_heads):
                raise UserError(
                    f"fsdp_context_parallel_size is {num_ranks}, but {self.config.model} has {heads}. Choose another "
                    "size"
                )

    @property
    def layout(self) -> Layout:
        size = self.config.fsdp_context_parallel_size
        return Layout.of_neighbors(self.rank, self.world_size, size, packs=self.policy.packs)

    @functools.cached_property
    def context(self) -> ContextGroup | None:
        """The ranks that share this rank's rows. Its first access is collective. Kept when weights are loaded again."""
        size = self.config.fsdp_context_parallel_size
        if size == 1:
            return None
        group, _ = dist.new_subgroups(size, timeout=COLLECTIVE_TIMEOUT)
        return ContextGroup.of(group)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: RowLoss, timeline: Timeline) -> None:
        with self._dropout():
            for index, micro_batch in enumerate(micro_batches):
                stays_gathered = self._keeps_gathered and index + 1 < len(micro_batches)  # they change in the update
                for unit in sharding.units(self.policy):
                    unit.set_reshard_after_backward(not stays_gathered, recurse=False)
                with self.replay.counting() if self.replay is not None else nullcontext():
                    logp_N, entropy_N = self._forward(micro_batch, self.config.temperature, timeline, index)
                total = loss(index, logp_N, entropy_N)
                with timeline.span("backward", index), self.reduction.during(timeline, index):
                    total.backward()

    @contextmanager
    def _dropout(self) -> Iterator[None]:
        """Activates the adapters' dropout. Its random numbers depend only on seed, rank and update."""
        if not (self.config.lora_rank and self.config.lora_dropout):
            yield
            return
        state: dict[str, Any] = next(iter(self.optimizer.state.values()), {})
        num_updates = int(state.get("step", 0))
        set_dropout(self.policy, True)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(hash((self.config.seed, self.rank, num_updates)) % 2**63)
            try:
                yield
            finally:
                set_dropout(self.policy, False)

    @torch.no_grad()
    def forward_logprobs(
        self, micro_batches: Sequence[MicroBatch], temperature: float | None = None
    ) -> list[torch.Tensor]:
        temperature = self.config.temperature if temperature is None else temperature
        logprobs = [self._forward(row, temperature, self.unmeasured())[0] for row in micro_batches]
        for unit in sharding.units(self.policy):
            unit.reshard()  # stayed gathered, since there was no backward pass
        return logprobs

    def _forward(
        self, micro_batch: MicroBatch, temperature: float, timeline: Timeline, index: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes logprob and entropy of a row's trained tokens, each [N]."""
        with timeline.span("data_to_device", index):
            row = model_input(micro_batch, self.device, self.kernel, self.context)
        if self.replay is not None:
            self.replay.routes_TXK = row.routes_TXK
        logp_N, entropy_N = self.policy(row, temperature, timeline, index)
        if self.context is not None:
            own_2N = torch.stack([logp_N, entropy_N])
            logp_N, entropy_N = whole_row(own_2N, row.own, int(micro_batch.trained_T.sum()), self.context)
        return logp_N, entropy_N

    @torch.no_grad()
    def optimizer_step(self, rate: float, divisor: float, timeline: Timeline) -> float:
        with timeline.span("gradient_norm"):
            gradients = self.local_gradients()
            norm = self.gradient_norm(gradients) / divisor
        with timeline.span("optimizer"):
            if not math.isfinite(norm):
                return norm
            torch._foreach_mul_(gradients, self.clip_factor(norm) / divisor)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.drop_gradient()
        return norm

    def take_gradient(self, divisor: float) -> list[GradientPart]:
        shards = [shard / divisor for shard in self.local_gradients()]
        self.drop_gradient()
        return [GradientPart(shards, None)]

    def drop_gradient(self) -> None:
        self.policy.zero_grad(set_to_none=True)

    def local_gradients(self) -> list[torch.Tensor]:
        """Returns this rank's non-empty gradient shards."""
        shards = [sharding.local_tensor(p.grad) for p in self.parameters if p.grad is not None]
        return [shard for shard in shards if shard.numel() > 0]

    def gradient_norm(self, local_gradients: list[torch.Tensor]) -> float:
        """Computes the L2 norm over all parameters of all ranks. Collective. Waits for the device."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        if local_gradients:
            squares += torch.stack(torch._foreach_norm(local_gradients)).double().square().sum()
        dist.all_reduce(squares)
        return math.sqrt(float(squares))

    @torch.no_grad()
    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        # Shards are cast before gathering, for half the bytes and half the memory.
        named = named_tensors(self.policy, PREFIX)
        if self.config.lora_rank:
            named = sharding.merged_tensors(named, self.policy, dtype)
        names = self.policy.checkpoint_names
        for name, tensor in sharding.gather_full_tensors(named, dtype, exact=names.float32_buffers):
            yield from names.parts(name, tensor.detach())

    def weight_metadata(self) -> list[TensorMeta]:
        names = self.policy.checkpoint_names
        return [
            TensorMeta(
                part, tuple(shape.shape), str(tensor.dtype).removeprefix("torch."), name in names.float32_buffers
            )
            for name, tensor in named_tensors(self.policy, PREFIX)
            if not is_adapter(name)
            for part, shape in names.parts(name, torch.empty(tensor.shape, device="meta"))
        ]

    @torch.no_grad()
    def save_adapter(self, directory: Path, dtype: torch.dtype | None = None) -> int:
        named = [(name, tensor) for name, tensor in named_tensors(self.policy, PREFIX) if is_adapter(name)]
        tensors = adapter_tensors(sharding.gather_full_tensors(named, dtype))
        try:
            if self.rank == 0:
                return write_adapter(directory, tensors, config_of_adapter(tensors, self.config))
        finally:  # the other ranks do not wait for an error
            dist.barrier()
        return 0

    @functools.cached_property
    def saver(self) -> BackgroundSaver:
        """Writes checkpoints. Kept when the weights are loaded again."""
        return BackgroundSaver(self.device, self.store_address)

    def _prepare_checkpoints(self) -> None:
        """Starts the writer and allocates the copy, which takes longer than a copy, before training begins."""
        saver, state = self.saver, self._saved_state()
        # torch has created the new optimizer's state with a step without gradients and learning rate, and counted it.
        for values in self.optimizer.state.values():
            values["step"].zero_()
        try:
            saver.copies.copy(state)
        except OSError as error:  # each checkpoint will fail for this reason, but the run continues
            logger.warning("checkpoints will fail: %s", error)

    def _saved_state(self) -> dict[str, Any]:
        return training_state(self.policy, self.optimizer if self.config.checkpoint_save_training_state else None)

    def save_checkpoint(self, step: int, directory: Path) -> None:
        self.saver.start(self._saved_state(), directory)

    def finish_checkpoint(self) -> None:
        self.saver.wait()

    def close(self) -> None:
        if "saver" in vars(self):
            self.saver.close()

    def load_checkpoint(self, step: int, directory: Path) -> None:
        load_training_state(self.policy, self.optimizer, directory)
