"""Saves and loads the Megatron backend's checkpoints in the format of megatron-core's `dist_checkpointing`.

Weights and moments are saved as whole tensors under Megatron's names, so that a checkpoint loads with other sizes of
tensor, pipeline, expert and data parallelism. `telescope convert` reads the weights without Megatron.

Without Transformer Engine and apex the optimizer is torch's AdamW, which keeps a `step` tensor for each parameter.
megatron-core 0.19 does not expect that in three places, which `_give_steps`, `_with_step` and the end of `load`
correct. Without the last correction, a resumed run differs without an error. A test compares a resumed with an
uninterrupted run, bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint import CheckpointException

from telescope.errors import RunError
from telescope.trainer.backends.megatron.optimizer import inner_optimizers

MODEL, OPTIMIZER = "model", "optimizer"


def _metadata() -> dict[str, Any]:
    """Returns the options for saving. They are a new dict each time, because Megatron adds its process groups to it."""
    return {"distrib_optim_sharding_type": "fully_reshardable"}


def save(stage: GPTModel, optimizer: MegatronOptimizer | None, directory: Path) -> None:
    """Writes the weights and, with an optimizer, its state. Raises `OSError` on all ranks. Collective."""
    state: dict[str, Any] = {MODEL: _weights(stage)}
    if optimizer is not None:
        state[OPTIMIZER] = optimizer.sharded_state_dict(state[MODEL], metadata=_metadata())
    try:
        dist_checkpointing.save(state, str(directory), validate_access_integrity=False)
    except CheckpointException as error:  # no `Exception`; only the first rank knows the reasons
        reasons = sorted({str(failure[0]) for failure in error.failures.values()})
        raise OSError("; ".join(reasons) or "the first rank's error has the reasons") from error


def load(stage: GPTModel, optimizer: MegatronOptimizer, directory: Path) -> None:
    """Loads a checkpoint that was saved with any division of the model. Collective.

    The optimizer keeps the settings of the config. It also keeps its state if the checkpoint has none. Raises
    `RunError` for the state of another optimizer.
    """
    state: dict[str, Any] = {MODEL: _weights(stage)}
    saved = dist_checkpointing.load_tensors_metadata(str(directory))
    has_optimizer = any(f"{OPTIMIZER}." in name for name in saved)  # of dense parameters, and of experts
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]
    if has_optimizer:
        _give_steps(optimizer)
        state[OPTIMIZER] = optimizer.sharded_state_dict(state[MODEL], is_loading=True, metadata=_metadata())
    loaded = dist_checkpointing.load(state, str(directory))
    stage.load_state_dict(loaded[MODEL], strict=False)  # without `_extra_state`
    if not has_optimizer:
        optimizer.reload_model_params()
        return
    try:
        with _with_step():
            optimizer.load_state_dict(loaded[OPTIMIZER])
    except (KeyError, ValueError) as error:
        raise RunError(
            f"{directory} has the state of another optimizer ({error}): set megatron_use_distributed_optimizer as in "
            "the run that wrote it"
        ) from error
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    for inner in inner_optimizers(optimizer):
        parts = [inner.optimizer]
        if isinstance(inner.optimizer, HybridDeviceOptimizer):
            parts = inner.optimizer.sub_optimizers
            # The part on the GPU counts steps itself, unless these groups, which are copied before each step, do.
            for group in inner.optimizer.param_groups:
                group.pop("step", None)
        for part in parts:
            _place(part)


def _place(optimizer: torch.optim.Optimizer) -> None:
    """Moves loaded state to the devices of its parameters.

    If both parts of an offloaded optimizer are torch's AdamW, Megatron moves the state of both to the CPU. Also, all
    parameters share one `step`, which each of them would increment. The fused update of a GPU needs `step` on the GPU.
    """
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if torch.is_tensor(value):
                values[name] = value.to(parameter.device, copy=name == "step")


def _weights(stage: GPTModel) -> dict[str, Any]:
    """Returns the sharded weights without Transformer Engine's `_extra_state`, since block scales need no history."""
    state: dict[str, Any] = stage.sharded_state_dict(metadata=_metadata())
    return {name: part for name, part in state.items() if not name.rpartition(".")[2].startswith("_extra_state")}


def _give_steps(optimizer: MegatronOptimizer) -> None:
    """Adds AdamW's `step` to the state of a new optimizer."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner.optimizer, HybridDeviceOptimizer) and not inner.optimizer.state:
            inner.optimizer.dummy_step()  # this changes the weights, which are loaded afterwards
        if not isinstance(inner.optimizer, torch.optim.AdamW):
            continue  # Transformer Engine's optimizer counts steps in its groups
        inner.init_state_fn(inner.optimizer, inner.config)
        for parameter, values in inner.optimizer.state.items():
            values.setdefault("step", torch.zeros((), device=parameter.device))


@contextmanager
def _with_step() -> Iterator[None]:
    """Lets the distributed optimizer load tensors without a `step`, which its own checkpoints lack."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(optimizer: DistributedOptimizer, parameter: Any, tensors: dict[str, Any]) -> None:
        original(optimizer, parameter, {"step": None, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original
