"""Trains a model that megatron-core divides over ranks.

Owns the passes over this rank's stage with Megatron's schedules, and the update. The model is in `model`, its weights
in `conversion`, the groups of ranks in `parallel`.

Invariants: the gradient of a parameter is a sum over tokens, as in the FSDP backend, and is divided once in
`optimizer_step`. Only the last stage calls the loss. Megatron's data-parallel buffers hold gradients between
`forward_backward` and `optimizer_step` and are zero otherwise.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.inference import unified_memory
from megatron.core.pipeline_parallel import get_forward_backward_func

from telescope.config.megatron import FP8_MULTIPLE, check_architecture, check_gpu_fields, check_transformer_engine
from telescope.errors import ConfigError
from telescope.trainer.attention import choose_kernel
from telescope.trainer.backends.megatron import checkpoint
from telescope.trainer.backends.megatron.conversion import Conversion
from telescope.trainer.backends.megatron.families import mappings_of, refuse_other_names
from telescope.trainer.backends.megatron.model import LastStage, Row, build_stage, transformer_config
from telescope.trainer.backends.megatron.optimizer import build_optimizer, inner_optimizers, wrap
from telescope.trainer.backends.megatron.parallel import destroy_groups, initialize
from telescope.trainer.batch import Layout, MicroBatch
from telescope.trainer.checkpoint_names import checkpoint_tensors
from telescope.trainer.model import compute_dtype, load_causal_lm
from telescope.trainer.model_input import model_input
from telescope.trainer.router_replay import replay_in_megatron
from telescope.trainer.sequence_exchange import whole_row
from telescope.trainer.step import GradientPart, RLBackend, RowLoss
from telescope.utils.timeline import Timeline
from telescope.weights.model_folder import model_folder
from telescope.weights.plan import TensorMeta

SPANS = {"backward-compute": "backward", "all-grads-sync": "gradient_reduction"}
"""Megatron's timers, and the names of their spans in the timeline."""


class MegatronBackend(RLBackend):
    """One rank of a Megatron trainer, on CPU (gloo) or GPU (NCCL)."""

    def init(self) -> None:
        super().init()
        config = self.config
        if self.device.type == "cpu" and torch.cuda.is_available():
            raise ConfigError("device: train_backend megatron uses the GPU where there is one: set device to 'auto'")
        check_transformer_engine(config)
        self.compiles = on_gpu = self.device.type == "cuda"
        major, minor = torch.cuda.get_device_capability(self.device) if on_gpu else (0, 0)
        check_gpu_fields(config, self.device.type, [major + minor / 10] if on_gpu else [])
        self.parallel = initialize(config)
        self.dtype = compute_dtype(config)
        skeleton = load_causal_lm(
            config.model, self.dtype, with_weights=False, trust_remote_code=config.trust_remote_code
        )
        self.hf_config = hf_config = skeleton.config
        check_architecture(config, hf_config.to_dict())
        shapes = {part: tensor.shape for part, tensor in checkpoint_tensors(skeleton)}
        mappings = mappings_of(hf_config, transformer_engine=config.megatron_use_transformer_engine)
        refuse_other_names(mappings, shapes)
        self.conversion = Conversion(hf_config, mappings, shapes, self.parallel)
        self.megatron = transformer_config(hf_config, config, self.parallel, self.dtype)
        rotary = type(skeleton.model.rotary_emb)(hf_config)
        self.inv_freq = rotary.inv_freq.float().to(self.device)
        self.stage = build_stage(hf_config, self.megatron, self.parallel).to(self.device)
        if self.replay is not None:
            # With sequence parallelism, routers see only a part of this rank's tokens.
            sharing = self.parallel.tp if self.megatron.sequence_parallel else None
            replay_in_megatron(self.stage, self.replay, sharing)
        self.conversion.load(self.stage, model_folder(config.model))
        self.ddp = wrap(self.stage, config)
        self.optimizer = build_optimizer(self.ddp, config)
        self.megatron.finalize_model_grads_func = _sum_gradients
        if config.megatron_overlap_grad_reduce:
            self.megatron.no_sync_func = self.ddp.no_sync
        self.last_stage = LastStage(self.parallel, hf_config.vocab_size, config.entropy_chunk_size)
        self.kernel = choose_kernel(self.device, self.dtype, self.conversion.heads.size)
        self.ddp.zero_grad_buffer()
        self._has_no_buffers = False
        if config.megatron_disable_unified_memory_jit:
            unified_memory._compilation_state = unified_memory.CompilationState.FAILURE

    @property
    def layout(self) -> Layout:
        own = self.parallel
        reports = own.is_last_stage and own.tp.rank() == 0 and own.cp.rank() == 0  # only the last stage has logprobs
        return Layout(own.dp.rank(), own.dp.size(), reports=reports)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: RowLoss, timeline: Timeline) -> None:
        def finish(index: int, logp_N: torch.Tensor, entropy_N: torch.Tensor) -> Any:
            return loss(index, logp_N, entropy_N), torch.zeros((), dtype=torch.int), {}

        if self._has_no_buffers:
            self.ddp.restore_grad_buffers()
            self._has_no_buffers = False
        self.megatron.timers = _timers(timeline)
        self._run(micro_batches, self.config.temperature, finish, timeline, forward_only=False)
        self.megatron.timers = None

    @torch.no_grad()
    def forward_logprobs(
        self, micro_batches: Sequence[MicroBatch], temperature: float | None = None
    ) -> list[torch.Tensor]:
        temperature = self.config.temperature if temperature is None else temperature
        timeline = self.unmeasured()
        results = self._run(micro_batches, temperature, lambda _, logp_N, __: logp_N, timeline, forward_only=True)
        sizes = [int(row.trained_T.sum()) for row in micro_batches]
        whole = torch.cat(results) if results else torch.empty(sum(sizes), dtype=self.loss_dtype, device=self.device)
        if self.parallel.pp.size() > 1:
            last = dist.get_global_rank(self.parallel.pp, self.parallel.pp.size() - 1)
            dist.broadcast(whole, last, group=self.parallel.pp)
        return list(whole.split(sizes))

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        finish: Callable[..., Any],
        timeline: Timeline,
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Runs Megatron's schedule. After a forward-only pass, returns the results of `finish` on the last stage."""

        def forward(rows: Iterator[tuple[int, MicroBatch]], model: Any, *_: Any) -> tuple[Any, Callable[..., Any]]:
            index, micro_batch = next(rows)
            with timeline.span("data_to_device", index):
                # Sequence parallelism divides the tokens of a part once more.
                multiple = self.parallel.tp.size() * (FP8_MULTIPLE if self.megatron.fp8 else 1)
                data = model_input(micro_batch, self.device, self.kernel, self.parallel.context, multiple)
            row = Row.of(data, temperature, self.inv_freq, self.dtype)
            counted = self.replay.counting() if self.replay is not None and not forward_only else nullcontext()
            with timeline.span("forward", index), counted:
                out = model(
                    data.token_ids_ST, data.position_ids_ST, None,
                    packed_seq_params=row, output_processor=self.last_stage, output_processor_context=row,
                )  # fmt: skip
            return out, partial(finish_row, index, micro_batch, data.own)

        def finish_row(index: int, micro_batch: MicroBatch, own: slice, out_2N: torch.Tensor, **_: Any) -> Any:
            context = self.parallel.context
            if context is not None:  # on every rank that shares the row
                out_2N = whole_row(out_2N, own, int(micro_batch.trained_T.sum()), context)
            return finish(index, *out_2N)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(enumerate(micro_batches)),
            model=[self.ddp],
            num_microbatches=len(micro_batches),
            seq_length=self.config.seq_len,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    @torch.no_grad()
    def optimizer_step(self, rate: float, divisor: float, timeline: Timeline) -> float:
        with timeline.span("gradient_norm"):
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm()) / divisor
        with timeline.span("optimizer"):
            if math.isfinite(norm):
                self.ddp.scale_gradients(self.clip_factor(norm) / divisor)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.optimizer.prepare_grads()
                self.optimizer.step_with_ready_grads()
            self.drop_gradient()
        return norm

    @torch.no_grad()
    def take_gradient(self, divisor: float) -> list[GradientPart]:
        self.optimizer.prepare_grads()
        parts = [
            GradientPart(
                [shard / divisor for shard in inner.get_grads_for_grad_norm()], inner.get_grad_stats_parallel_group()
            )
            for inner in inner_optimizers(self.optimizer)
        ]
        self.drop_gradient()
        return parts

    def drop_gradient(self) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        if self.config.weight_broadcast_free_grad_buffers and not self._has_no_buffers:
            self.ddp.offload_grad_buffers()  # they are zero now; the next forward pass restores them
            self._has_no_buffers = True
        yield from self.conversion.export(dict(self.stage.named_parameters()), dtype or self.dtype)

    def weight_metadata(self) -> list[TensorMeta]:
        dtype, shapes = str(self.dtype).removeprefix("torch."), self.conversion.shapes
        names = (name for mapping in self.conversion.mappings for name in mapping.names)
        return [TensorMeta(name, tuple(shapes[name]), dtype) for name in names]

    def save_checkpoint(self, step: int, directory: Path) -> None:
        checkpoint.save(self.stage, self.optimizer if self.config.checkpoint_save_training_state else None, directory)

    def load_checkpoint(self, step: int, directory: Path) -> None:
        checkpoint.load(self.stage, self.optimizer, directory)

    def close(self) -> None:
        destroy_groups()


def _sum_gradients(models: list[Any], num_tokens: Any = None, **options: Any) -> None:
    """Sums gradients over ranks without Megatron's division by a token count, because the step has its own counts."""
    finalize_model_grads(models, None, **options)


def _timers(timeline: Timeline) -> Callable[..., SimpleNamespace]:
    """Returns timers for Megatron's schedules that record spans, numbered by micro-batch, on the timeline."""
    numbers = {span: itertools.count() for span in SPANS.values()}
    running: dict[str, AbstractContextManager[None]] = {}

    def timer(name: str, log_level: int | None = None) -> SimpleNamespace:
        span = SPANS.get(name)

        def start(barrier: bool = False) -> None:
            if span is not None:
                running[span] = timeline.span(span, next(numbers[span]))
                running[span].__enter__()

        def stop(barrier: bool = False) -> None:
            if span is not None:
                running.pop(span).__exit__(None, None, None)

        return SimpleNamespace(start=start, stop=stop)

    return timer
