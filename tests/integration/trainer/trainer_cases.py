"""Tiny models, batches and ranks that the trainer's integration tests share."""

import gc
import json
import multiprocessing
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.processes import free_port
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from telescope.algorithms import compute_advantages
from telescope.config import TelescopeConfig
from telescope.orchestrator.checkpoints import META
from telescope.trainer import worker
from telescope.trainer.backends.fsdp import checkpoint
from telescope.trainer.batch import StepInput, TrainSample
from telescope.trainer.checkpoint_names import CheckpointNames
from telescope.trainer.loss import denominator
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.model import load_causal_lm
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer
from telescope.utils.digests import digests_of, files_below
from telescope.utils.timeline import Timeline

VOCAB = 61
RANKS_DEADLINE_SECONDS = 180

ALL_MODIFIERS = {
    "use_ppo_clip": True, "ppo_clip_ref_logprobs": "batch", "clip_ratio_c": 1.2, "use_tis": True, "tis_cap": 1.2,
    "tis_mode": "icepop", "seq_is_masking": True, "seq_is_mask_low": 0.9, "seq_is_mask_high": 1.1,
    "kl_penalty_tau": 0.1, "entropy_coef": 0.2,
}  # fmt: skip
"""Settings that put everything on top of a loss that can be put there together."""


def by_checkpoint_name(model: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a model's parameters, by what checkpoints call them."""
    names = CheckpointNames(load_causal_lm(model, torch.float32, with_weights=False))
    return {part: value for name, tensor in tensors.items() for part, value in names.parts(name, tensor)}


def build_model(directory: Path, *, family: str = "qwen2", tied: bool = True, seed: int = 0, **changes: Any) -> str:
    """A random model of some 10,000 parameters, written as a checkpoint.

    transformers computes Qwen2's norms in float32 whatever the model's dtype; `starcoder2` is float64 throughout.
    """
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied, "initializer_range": 0.3,
        "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    shape |= changes
    if family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    elif family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**(shape | {"head_dim": 4} | changes)))
    elif family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(shape | {"head_dim": 4} | experts | changes)))
    else:
        model = Starcoder2ForCausalLM(Starcoder2Config(**shape, residual_dropout=0.1, embedding_dropout=0.1))
    model.to(torch.float64).save_pretrained(directory)
    return str(directory)


def make_config(model: str, **changes: Any) -> Any:
    """The fields that the trainer reads, at float64 unless changed; those not named here have their defaults."""
    defaults = {
        name: field.get_default(call_default_factory=True) for name, field in TelescopeConfig.model_fields.items()
    }
    fields: dict[str, Any] = {
        "seed": 0, "model": model, "model_dtype": "float64", "mixed_precision_dtype": None, "device": "cpu",
        "trainer_threads": 1, "gradient_checkpointing": False, "recompute_attention": False,
        "gradient_checkpointing_layers": None, "fsdp_reshard_after_forward": "auto", "fsdp_prefetch_layers": 1,
        "compile_blocks": True, "trust_remote_code": False, "learning_rate": 1e-2,
        "weight_decay": 0.0, "grad_clip": 1.0, "lr_scheduler": "constant", "warmup_steps": 0, "min_lr_ratio": 0.0,
        "train_backend": "fsdp", "algorithm": "grpo", "entropy_chunk_size": 7, "temperature": 1.0, "max_tokens": 32,
        "seq_len": 200, "pad_to_multiple_of": 8, "number_of_steps": 10, "track_gpu_events": True,
        "hash": "0123456789ab", "compare_first_steps": 0,
        "environments": [SimpleNamespace(name="countdown")],
    }  # fmt: skip
    merged = defaults | fields | changes
    computed = merged["mixed_precision_dtype"] or merged["model_dtype"]
    return SimpleNamespace(**({"compute_dtype": computed, "precisions": ("float32", computed)} | merged))


def make_samples(lengths: list[int], *, group_size: int = 4, seed: int = 0, version: int = 0) -> list[TrainSample]:
    """Random trajectories with random trained stretches, rewards and engine logprobs."""
    rng = np.random.default_rng(seed)
    samples = []
    for index, length in enumerate(lengths):
        trained_L = rng.random(length) < 0.6
        trained_L[0], trained_L[-1] = False, True
        samples.append(
            TrainSample(
                sample_id=f"s{index}",
                group_id=index // group_size,
                environment="countdown",
                token_ids_L=rng.integers(0, VOCAB, length),
                trained_L=trained_L,
                engine_logprob_L=np.where(trained_L, -rng.random(length) * 6, 0.0),
                version_L=np.where(trained_L, version, -1),
                reward=float(rng.integers(0, 4)),
            )
        )
    compute_advantages(samples)
    return samples


def packed_share(trainer: Trainer, samples: list[TrainSample], **packing: int) -> StepInput:
    """This rank's input of a step over the samples."""
    layout = trainer.backend.layout
    options = {"step": 0, "version": 0, "seq_len": 40, "pad_to_multiple_of": 8, **packing}
    return pack_step(samples, num_ranks=layout.data_size, **options)[layout.data_rank]


def near_policy(samples: list[TrainSample], trainer: Trainer, noise: float = 0.3) -> list[TrainSample]:
    """The samples with engine logprobs that are the trainer's own and some noise. Collective."""
    rng = np.random.default_rng(1)
    for sample in samples:
        own_L = np.array(
            [0.0, *trainer.backend.sequence_logprobs(sample.token_ids_L.tolist(), trainer.config.temperature)]
        )
        sample.engine_logprob_L = np.where(sample.trained_L, own_L + rng.normal(0, noise, sample.length), 0.0)
    return samples


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Yields free ports that only a server can still bind: no connection of another process gets one meanwhile."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield [int(one.getsockname()[1]) for one in sockets]


def relative_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Relative L2 error over all tensors together."""
    assert found.keys() == wanted.keys()
    difference = sum(float((found[n].double() - wanted[n].double()).square().sum()) for n in wanted)
    return (difference / sum(float(wanted[n].double().square().sum()) for n in wanted)) ** 0.5


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Full gradients of trained parameters by Hugging Face name, on the CPU; forgets them. Collective."""
    found = {}
    for name, parameter in trainer.backend.policy.named_parameters():  # type: ignore[attr-defined]
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        found[name.removeprefix("causal_lm.")] = parameter.grad.full_tensor().clone().cpu()
        parameter.grad = None
    return found


def step_gradient(trainer: Trainer, step_input: StepInput) -> dict[str, torch.Tensor]:
    """The gradient of one optimizer step by Hugging Face name, of either backend. Collective."""
    backend: Any = trainer.backend
    (batch,) = step_input.minibatches
    backend.accumulate(batch, 0, Timeline(backend.device, trainer.rank), StepMetrics(backend.device))
    if trainer.config.train_backend == "fsdp":
        found = gradients(trainer)
    else:
        own = {name: parameter.main_grad for name, parameter in backend.stage.named_parameters()}
        found = dict(backend.conversion.export(own, torch.float32))
    divisor = denominator(backend.algorithm, batch, trainer.config)
    return {name: (tensor / divisor).cpu() for name, tensor in found.items()}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of all weights, on the CPU. Collective."""
    return {name: tensor.clone().cpu() for name, tensor in trainer.named_weights()}


def write_meta(checkpoint: Path, model: str, **changes: Any) -> None:
    """Completes a checkpoint of a backend, as `orchestrator.checkpoints` does."""
    meta = {"layout": 1, "step": 2, "time": 1.5, "model": model, "train_backend": "fsdp", "config_hash": "abc"}
    files = digests_of(checkpoint, set(files_below(checkpoint)) - {META})
    meta |= {"ranks": 1, "training_state": True, "config": {}, "files": files}
    (checkpoint / META).write_text(json.dumps(meta | changes))


def fork_server() -> ForkServerContext:
    """Returns a context whose processes have torch and transformers imported, once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def set_up_quickly() -> None:
    """Saves trainers of this process collections of 0.25 s each, and their checkpoint writers the imports."""
    worker.freeze_heap = worker.unfreeze_heap = lambda: None
    checkpoint.START_METHOD = fork_server().get_start_method()


Job = tuple[Callable[..., Any], Any, tuple[Any, ...]]
"""A function of (trainer, *arguments), the config of the trainer, and the arguments."""


def run_here(job: Job) -> Any:
    """The job on one rank, in this process."""
    function, config, arguments = job
    trainer = Trainer(config, 0, 1, "127.0.0.1", free_port())
    try:
        trainer.setup()
        return function(trainer, *arguments)
    finally:
        trainer.shutdown()


def run_ranks(
    jobs: list[Job], *, num_ranks: int, folder: Path, seconds: float = RANKS_DEADLINE_SECONDS
) -> list[list[Any]]:
    """The jobs one after the other on `num_ranks` new processes, a new trainer for each: results by job, then by rank.

    A rank that raises fails the test with its traceback; ranks that are not done after `seconds` are ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with reserved_ports(len(jobs)) as ports:
        processes = [
            fork_server().Process(target=_rank_main, args=(jobs, rank, num_ranks, ports, folder))
            for rank in range(num_ranks)
        ]
        deadline = time.monotonic() + seconds
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
            for process in processes:
                process.kill()
                process.join()
    failures = [path.read_text() for path in sorted(folder.glob("*.failed"))]
    assert not failures, "\n".join(failures)
    assert not hanging, f"ranks {hanging} did not finish within {seconds:g} s"
    by_rank = [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(num_ranks)]
    return [list(results) for results in zip(*by_rank, strict=True)]


def _rank_main(jobs: list[Job], rank: int, num_ranks: int, ports: list[int], folder: Path) -> None:
    set_up_quickly()
    gc.freeze()
    try:
        results = []
        for (function, config, arguments), port in zip(jobs, ports, strict=True):
            trainer = Trainer(config, rank, num_ranks, "127.0.0.1", port)
            trainer.setup()
            results.append(function(trainer, *arguments))
            trainer.shutdown()
        (folder / f"{rank}.result").write_bytes(pickle.dumps(results))
    except BaseException:
        (folder / f"{rank}.failed").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
