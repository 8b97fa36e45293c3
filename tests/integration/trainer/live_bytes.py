"""Counts the bytes of all tensors that are alive, as they come and go: what an allocator would have given out.

Works for real tensors and for fake ones, which have sizes and no data, so that a large model can be counted on a small
machine. Storages that were made before counting began count from when an operation first returns them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class LiveBytes(TorchDispatchMode):
    """While entered, keeps `now` and `peak`; `mark` starts a new peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveBytes:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            # FSDP frees and restores gathered weights by the size of their storage.
            result = self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it does the same to its local tensor, which is counted
        result = function(*args, **(kwargs or {}))
        self.add(tree_flatten(result)[0])
        return result

    def add(self, tensors: Iterable[Any]) -> None:
        """Count these, if they are tensors and are not counted yet."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())

    def mark(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.now += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
