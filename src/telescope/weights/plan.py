"""The plan of a sync: the bucket layout. Both ends of a transfer derive it independently.

Owns the description of a tensor (`TensorMeta`), the bucket layout, the two records that are sent as JSON over vLLM's
control routes (`InitInfo`, `UpdateInfo`), a rank's report to the driver (`SendReport`), and the arithmetic of
fingerprints that needs no tensor. Owns no tensor and no socket, and imports neither torch nor vLLM.

Invariants: the layout is a pure function of `UpdateInfo`. Tensors keep the trainer's order. Every tensor is in one
bucket, at an offset that is a multiple of `ALIGNMENT_BYTES`. Only a tensor larger than the bucket size makes a bucket
larger. Both ends compare `UpdateInfo.digest` before the first byte, because gloo ends the process if two sides disagree
about a size.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from telescope.config.model_shape import DTYPE_BYTES
from telescope.utils.timeline import Span

if TYPE_CHECKING:
    import torch

BroadcastMode = Literal["flattened_bucket", "per_tensor"]

ALIGNMENT_BYTES = 64
"""A cache line. Each tensor of a bucket starts at one, so that copies vectorize."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One trainer tensor: Hugging Face name, full shape, dtype (`float32`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    exact: bool = False
    """Whether engines keep it in this dtype whatever theirs is, as a buffer that corrects the router's scores."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one broadcast of `num_elements` elements of the transfer's dtype, alignment gaps included."""

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
    wide: list[str] = field(default_factory=list)
    """Names of the tensors that are sent in float32 although `dtype` is narrower (`TensorMeta.exact`)."""

    def __post_init__(self) -> None:
        assert self.dtype in DTYPE_BYTES, f"weights cannot be sent as {self.dtype}"
        assert len(self.names) == len(self.shapes) == len(set(self.names)), "a tensor is listed twice or has no shape"

    @property
    def metas(self) -> list[TensorMeta]:
        dtypes = dict.fromkeys(self.names, self.dtype) | dict.fromkeys(self.wide, "float32")
        return [TensorMeta(n, tuple(s), dtypes[n]) for n, s in zip(self.names, self.shapes, strict=True)]

    @property
    def num_bytes(self) -> int:
        """Returns the payload of the sync in bytes, without alignment gaps."""
        return sum(meta.numel * DTYPE_BYTES[meta.dtype] for meta in self.metas)

    @property
    def digest(self) -> str:
        """Returns a hex digest of everything on which both sides must agree."""
        agreed = [self.version, self.dtype, self.mode, self.bucket_bytes, self.names, self.shapes, self.wide]
        return hashlib.sha256(json.dumps(agreed).encode()).hexdigest()[:32]

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields by name without copying lists. A model with experts has tens of thousands of names."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(slots=True)
class SendReport:
    """The report of one sync on one trainer rank."""

    engine_seconds: dict[int, float] = field(default_factory=dict)
    """Per engine: wall time from the announcement to its confirmation."""
    errors: dict[int, str] = field(default_factory=dict)
    """Engines without the new weights, and why. They need a new connection before the next sync."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Per tensor, in hex, after the cast and before the copy into a bucket; only if requested."""
    spans: list[Span] = field(default_factory=list)
    """The phases of this rank: `weight_broadcast_agree`, and per bucket `weight_broadcast_gather` and
    `weight_broadcast_wait`, then `weight_broadcast_conclude`."""


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
        wide=[meta.name for meta in metas if meta.exact and meta.dtype == "float32" != dtype],
    )


def plan_buckets(update: UpdateInfo) -> list[Bucket]:
    """Returns the buckets of a sync in sending order.

    `flattened_bucket` fills each bucket up to `bucket_bytes`; `per_tensor` puts every tensor into a separate bucket.
    """
    item = DTYPE_BYTES[update.dtype]
    step = ALIGNMENT_BYTES // item
    limit = update.bucket_bytes // item if update.mode == "flattened_bucket" else 0
    buckets: list[Bucket] = []
    entries: list[tuple[TensorMeta, int]] = []
    used = 0
    for meta in update.metas:
        offset = -(-used // step) * step
        size = meta.numel * DTYPE_BYTES[meta.dtype] // item
        if entries and offset + size > limit:
            buckets.append(Bucket(tuple(entries), used))
            entries, offset = [], 0
        entries.append((meta, offset))
        used = offset + size
    return [*buckets, Bucket(tuple(entries), used)] if entries else buckets


def tensor_in(bucket_N: torch.Tensor, meta: TensorMeta, start: int) -> torch.Tensor:
    """Returns a view of a tensor in a bucket of N elements, of which `start` is its first."""
    import torch

    dtype: torch.dtype = getattr(torch, meta.dtype)
    size = meta.numel * dtype.itemsize // bucket_N.element_size()
    return bucket_N[start : start + size].view(dtype).view(meta.shape)


def as_matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the matrix shape for hashing: the first dimension by the rest. A scalar is 1 x 1."""
    if not shape:
        return 1, 1
    return shape[0], math.prod(shape[1:])


def add_fingerprints(parts: list[int]) -> int:
    """Adds shares, modulo 2^64."""
    return sum(parts) % (1 << 64)


def to_hex(value: int) -> str:
    """Formats a fingerprint as 16 hex digits. JSON has no 64-bit integers."""
    return f"{value:016x}"
