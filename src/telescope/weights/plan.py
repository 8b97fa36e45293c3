"""The plan of a sync: the bucket layout. Both ends of a transfer derive it independently.

Owns the description of a tensor (`TensorMeta`), the bucket layout, and the two records that are sent as JSON over
vLLM's control routes (`InitInfo`, `UpdateInfo`). Owns no tensor and no socket, and imports neither torch nor vLLM.

Invariants: the layout is a pure function of `UpdateInfo`. Tensors keep the trainer's order. Every tensor is in one
bucket, at an offset that is a multiple of `ALIGNMENT_BYTES`. Only a tensor larger than the bucket size makes a bucket
larger. Both ends compare `UpdateInfo.digest` before the first byte, because gloo ends the process if two sides disagree
about a size.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

BroadcastMode = Literal["flattened_bucket", "per_tensor"]

ALIGNMENT_BYTES = 64
"""A cache line. Each tensor of a bucket starts at one, so that copies vectorize."""

MIB = 1 << 20

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of the dtypes of a transfer."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One trainer tensor: Hugging Face name, full shape, dtype (`float32`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one broadcast of `num_elements` elements, alignment gaps included."""

    entries: tuple[tuple[TensorMeta, int], ...]
    """Each tensor and the element at which it begins."""
    num_elements: int


@dataclass(frozen=True, slots=True)
class InitInfo:
    """Connection data for an engine's workers: body of vLLM's `/init_weight_transfer_engine`.

    The sender is rank 0; worker w of the engine is rank w + 1. `token` authenticates the workers.
    """

    host: str
    port: int
    token: str
    world_size: int
    backend: Literal["gloo", "nccl"]
    timeout_seconds: float
    pin_memory: bool = True


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """One sync: body of vLLM's `/update_weights`, and all inputs of the layout.

    `dtype` is the transfer's dtype, in which the engine computes; the sender casts. `version` is the engine's policy
    version after the sync. `timeout_seconds` is the deadline of the whole transfer.
    """

    version: int
    dtype: str
    mode: BroadcastMode
    bucket_bytes: int
    names: list[str]
    shapes: list[list[int]]
    timeout_seconds: float
    background: bool = False
    """Whether the engine receives it while it samples (`weights.receiver`). The sender does the same in both cases."""
    verify: bool = False
    """Whether engines prepare to be compared with this update (`weights.engine_quantized`)."""
    folder: str = ""
    """Model folder from which every worker loads the tensors itself, instead of a transfer."""

    def __post_init__(self) -> None:
        assert self.dtype in ITEM_BYTES, f"weights cannot be sent as {self.dtype}"
        assert len(self.names) == len(self.shapes) == len(set(self.names)), "a tensor is listed twice or has no shape"

    @property
    def metas(self) -> list[TensorMeta]:
        return [TensorMeta(n, tuple(s), self.dtype) for n, s in zip(self.names, self.shapes, strict=True)]

    @property
    def num_bytes(self) -> int:
        """Returns the payload of the sync in bytes, without alignment gaps."""
        return sum(meta.numel for meta in self.metas) * ITEM_BYTES[self.dtype]

    @property
    def digest(self) -> str:
        """Returns a hex digest of everything on which both sides must agree."""
        agreed = [self.version, self.dtype, self.mode, self.bucket_bytes, self.names, self.shapes]
        return hashlib.sha256(json.dumps(agreed).encode()).hexdigest()[:32]

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields by name without copying lists. A model with experts has tens of thousands of names."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def make_update(
    metas: Sequence[TensorMeta],
    *,
    version: int,
    dtype: str,
    mode: BroadcastMode = "flattened_bucket",
    bucket_mb: int = 256,
    timeout_seconds: float = 600.0,
    folder: str = "",
) -> UpdateInfo:
    """Plans a sync of the tensors in `metas`, in their order.

    Tied parameters are sent once, under their first name (the input embedding). The engine restores the tie, and the
    probe reads both uses.
    """
    return UpdateInfo(
        version=version,
        dtype=dtype,
        mode=mode,
        bucket_bytes=bucket_mb * MIB,
        names=[meta.name for meta in metas],
        shapes=[list(meta.shape) for meta in metas],
        timeout_seconds=timeout_seconds,
        folder=folder,
    )


def plan_buckets(update: UpdateInfo) -> list[Bucket]:
    """Returns the buckets of a sync in sending order.

    `flattened_bucket` fills each bucket up to `bucket_bytes`; `per_tensor` puts every tensor into a separate bucket.
    """
    item = ITEM_BYTES[update.dtype]
    step = ALIGNMENT_BYTES // item
    limit = update.bucket_bytes // item if update.mode == "flattened_bucket" else 0
    buckets: list[Bucket] = []
    entries: list[tuple[TensorMeta, int]] = []
    used = 0
    for meta in update.metas:
        offset = -(-used // step) * step
        if entries and offset + meta.numel > limit:
            buckets.append(Bucket(tuple(entries), used))
            entries, offset = [], 0
        entries.append((meta, offset))
        used = offset + meta.numel
    return [*buckets, Bucket(tuple(entries), used)] if entries else buckets
