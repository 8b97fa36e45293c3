"""Checks of a run's model before the start: its files, its shape, and the memory and disks that it needs.

They read a `ModelReport`, what the files say. `orchestrator.preflight` lists them with the checks of everything else.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from telescope.config import lora, megatron
from telescope.config.loader import choose_checkpoint_dir, choose_run_dir
from telescope.config.machine import SHARED_MEMORY, existing_parent
from telescope.config.memory import GIB, checkpoint_bytes, estimate_memory, trainer_share
from telescope.config.model_files import ModelReport, vocabulary_size
from telescope.config.model_shape import DTYPE_BYTES
from telescope.config.model_source import architecture_of, why_no_router_replay
from telescope.config.plan import ClusterResources, resolve_device
from telescope.errors import ConfigError

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig


def check_report(config: TelescopeConfig, report: ModelReport) -> None:
    """Checks that the model's files are readable, and sizes that filters need."""
    if report.unchecked:
        raise ConfigError(
            f"model is {config.model!r}: {report.unchecked}. Set model to a local folder, or connect to the hub, or "
            "download the model beforehand (`hf download`)"
        )
    if config.filter_gibberish:
        vocabulary_size(config)


def check_shape(config: TelescopeConfig, report: ModelReport) -> None:
    """Checks fields that the model's shape excludes, on any machine."""
    shape = report.shape
    if config.router_replay and (why := why_no_router_replay(config, shape)) is not None:
        raise ConfigError(f"router_replay is true, but {why}. Set router_replay to false")
    if config.lora_rank and shape is not None and (report.unchecked or architecture_of(config) in megatron.MODEL_TYPES):
        lora.choose_layers(config.lora_target_modules, [name for name, _, _ in lora.linear_layers(shape)])


def checkpoint_sentence(config: TelescopeConfig, report: ModelReport) -> str | None:
    """Returns what one checkpoint takes and what there is. None without checkpoints, or if sizes are not known."""
    if not config.checkpoint_every or report.shape is None:
        return None
    folder = choose_checkpoint_dir(config.checkpoint_dir, choose_run_dir(config))
    free = shutil.disk_usage(existing_parent(folder)).free
    size = checkpoint_bytes(config, report.shape)
    return (
        f"A checkpoint takes about {_size(size)} of the {_size(free)} that are free on its disk, and as much shared "
        "memory on the nodes of the trainer."
    )


def check_disk(config: TelescopeConfig, report: ModelReport) -> None:
    """Checks that the trained model and one checkpoint fit on their disks."""
    if report.shape is None:
        return
    run_dir = choose_run_dir(config)
    folder = choose_checkpoint_dir(config.checkpoint_dir, run_dir)
    model = report.shape.num_parameters * DTYPE_BYTES[config.model_dtype] if config.save_final_model else 0
    checkpoint = checkpoint_bytes(config, report.shape) if config.checkpoint_every else 0
    smaller = "checkpoint_save_training_state to false, or checkpoint_every to 0"
    used: dict[int, int] = {}
    for field, place, size, what, fix in (
        ("run_dir", run_dir, model, "the trained model", "save_final_model to false"),
        ("checkpoint_dir", folder, checkpoint, "one checkpoint", smaller),
    ):
        parent = existing_parent(place)
        disk, device = shutil.disk_usage(parent), parent.stat().st_dev
        beside = f", beside {_size(used[device])} for the trained model" if size and used.get(device) else ""
        used[device] = used.get(device, 0) + size
        if size and disk.total and disk.free < used[device]:  # what is no disk, such as /proc, has no size
            raise ConfigError(
                f"{field} is {str(place)!r}, whose disk has {_size(disk.free)} free, and {what} takes about "
                f"{_size(size)}{beside}. Free some space, set {field} to a folder of another disk, or set {fix}"
            )


def check_checkpoint_memory(config: TelescopeConfig, report: ModelReport) -> None:
    """Checks shared memory for the copies of FSDP's ranks here."""
    if config.train_backend == "megatron":
        return
    if not config.checkpoint_every or report.shape is None or not SHARED_MEMORY.is_dir():
        return
    needed, free = checkpoint_bytes(config, report.shape), shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        raise ConfigError(
            f"{SHARED_MEMORY} has {_size(free)} free, and the ranks copy about {_size(needed)} there for a checkpoint. "
            f"Start the container with more, such as `docker run --shm-size={-(-needed // GIB) + 8}g`, set "
            "checkpoint_save_training_state to false, or set checkpoint_every to 0"
        )


def check_memory(config: TelescopeConfig, report: ModelReport, machine: ClusterResources) -> None:
    """Checks that a trainer rank fits beside the server on a shared GPU, and `max_model_len` tokens in the KV cache.

    On GPUs only weights are counted beside the KV cache.
    """
    if report.shape is None:
        return
    device, node = resolve_device(config, machine), machine.nodes[0]
    memory = node.memory_bytes if device == "cpu" else node.gpu_memory_bytes
    estimate = estimate_memory(config, report.shape, device=device, device_memory_bytes=memory)
    shares = config.share_gpus and device == "cuda" and memory is not None
    if shares and estimate.trainer.states > trainer_share(config, memory or 0):
        raise ConfigError(estimate.problems[0])
    left = int((memory or 0) * config.gpu_memory_utilization) - estimate.engine.weights
    if estimate.kv_cache_problem and (device == "cpu" or left < estimate.engine.longest_sequence_kv):
        raise ConfigError(estimate.kv_cache_problem)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{-(-num_bytes >> 20):,} MiB"
