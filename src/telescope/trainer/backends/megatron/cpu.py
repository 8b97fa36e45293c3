"""Runs megatron-core on the CPU, for tests and small models.

megatron-core asks CUDA for a device, for streams and for random states by name. `place_on_cpu` gives it the CPU
instead. It changes the place of tensors and makes streams and events do nothing; every product, schedule and collective
is Megatron's. It changes `torch.cuda` for the whole process, so call it only in the process of a trainer rank without a
GPU.

The tests of the Megatron backend fail if a version of megatron-core needs something else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _is_cuda(place: object) -> bool:
    return (isinstance(place, str) and place.startswith("cuda")) or (
        isinstance(place, torch.device) and place.type == "cuda"
    )


class _OnCPU(TorchFunctionMode):
    """Replaces CUDA by the CPU in the arguments of torch functions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if name == "type" and len(args) == 1 and not kwargs:
            # The optimizers take parameters of types like torch.cuda.FloatTensor, which they compare by name.
            return "torch.cuda." + func(*args).removeprefix("torch.")
        if _is_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": CPU}
        if name == "to" and any(map(_is_cuda, args[1:])):
            args = tuple(CPU if _is_cuda(value) else value for value in args)
        return func(*args, **kwargs)


class _Idle:
    """A stream or event of a device that finishes each call before it returns."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def ended(self, *_: Any) -> _Idle:
        return self

    record = wait = synchronize = query = wait_stream = wait_event = record_event = ended


@functools.cache
def place_on_cpu() -> None:
    """Replaces CUDA by the CPU in this process. Call it before the first import of `megatron.core`. Idempotent."""
    stream = _Idle()
    # One function per name, because torch.compile refuses a function that has two names.
    replaced: dict[str, Any] = {
        "current_device": lambda: CPU,
        "synchronize": lambda *_, **__: None,
        "empty_cache": lambda *_, **__: None,
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
        "stream": lambda *_, **__: contextlib.nullcontext(),
        "Stream": _Idle,
        "Event": _Idle,
        # The model draws no random numbers: there is no dropout, and the weights are loaded.
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": lambda *_, **__: None,
        "_lazy_call": lambda *_, **__: None,
        "memory_allocated": lambda *_, **__: 0,
        "max_memory_allocated": lambda *_, **__: 0,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    _OnCPU().__enter__()
    # The sizes of the exchange between experts become numbers only if they are on a GPU.
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def as_host_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu = as_host_numbers
