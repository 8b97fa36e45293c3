"""What is sent in which order: the bucket layout that both ends of a transfer derive by themselves.

Owns the description of a tensor (`TensorMeta`), the bucket layout, and the two records that travel as JSON through
vLLM's control routes (`InitInfo`, `UpdateInfo`). Owns no tensor and no socket, and imports neither torch nor vLLM.

Invariants: the layout is a pure function of `UpdateInfo`; tensors keep the order in which the trainer yields them;
every tensor lies whole in one bucket, at an offset that is a multiple of `ALIGNMENT_BYTES`; only a tensor larger than
the bucket size makes a bucket larger than that. `UpdateInfo.digest` names the layout, and both ends compare it before
the first byte, because gloo ends the process when two sides disagree about a size.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

BroadcastMode = Literal["flattened_bucket", "per_tensor"]

ALIGNMENT_BYTES = 64
"""A cache line: each tensor of a bucket starts on one, so that copies in and out of it vectorize."""

MIB = 1 << 20

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of the dtypes that weights travel in."""


def sender_rank(engine: int, world_size: int) -> int:
    """The trainer rank that sends to an engine: engines are spread evenly over the ranks."""
    return engine % world_size


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One trainer tensor: its Hugging Face name, full shape, and the dtype the trainer keeps it in."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A tensor's place in a bucket: `numel` elements from element `offset`."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel in one broadcast of `num_elements` elements, gaps for alignment included."""

    entries: tuple[BucketEntry, ...]
    num_elements: int


@dataclass(frozen=True, slots=True)
class InitInfo:
    """How an engine's workers reach their sender: body of vLLM's `/init_weight_transfer_engine`.

    The sender is rank 0; worker w of the engine is rank `rank_offset + w`. `token` keeps strangers on the host from
    joining. `cpu_staging` means: the bytes arrive in host memory over gloo, whatever device the engine computes on.
    """

    host: str
    port: int
    token: str
    world_size: int
    backend: Literal["gloo", "nccl"]
    timeout_seconds: float
    rank_offset: int = 1
    pin_memory: bool = True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """One sync: body of vLLM's `/update_weights`, and all that the layout depends on.

    `dtype` is the dtype on the wire, which is the one the engine computes in; the sender casts. `version` is the policy
    version that the engine has when the sync is done. `timeout_seconds` is the deadline of the whole transfer.
    """

    version: int
    dtype: str
    mode: BroadcastMode
    bucket_bytes: int
    names: list[str]
    shapes: list[list[int]]
    timeout_seconds: float
    tied: list[str] = field(default_factory=list)
    """Names left out because they are the same parameter as a tensor that is sent (see `make_update`)."""
    background: bool = False
    """The engine receives it beside its work (see `weights.background`). For the sender that makes no difference."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"weights cannot travel as {self.dtype!r}; use one of {sorted(ITEM_BYTES)}")
        if len(self.names) != len(self.shapes):
            raise ValueError(f"{len(self.names)} names but {len(self.shapes)} shapes")
        if len(set(self.names)) != len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise ValueError(f"tensors named twice: {twice}")
        if self.bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {self.bucket_bytes}")

    @property
    def metas(self) -> list[TensorMeta]:
        return [TensorMeta(n, tuple(s), self.dtype) for n, s in zip(self.names, self.shapes, strict=True)]

    @property
    def num_bytes(self) -> int:
        """Payload of the sync in bytes, without alignment gaps."""
        return sum(meta.numel for meta in self.metas) * ITEM_BYTES[self.dtype]

    @property
    def digest(self) -> str:
        """Hex digest of everything that both sides must agree on."""
        agreed = [self.version, self.dtype, self.mode, self.bucket_bytes, self.names, self.shapes]
        return hashlib.sha256(json.dumps(agreed).encode()).hexdigest()[:32]

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, lists shared: a model with experts has tens of thousands of names."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def make_update(
    metas: Iterable[TensorMeta],
    *,
    version: int,
    dtype: str,
    mode: BroadcastMode = "flattened_bucket",
    bucket_mb: int = 256,
    timeout_seconds: float = 600.0,
    tied: Iterable[str] = (),
) -> UpdateInfo:
    """Describe a sync of the tensors in `metas`, in their order.

    Tied parameters travel once. transformers' `named_parameters()` lists a tied parameter under its first name (the
    input embedding) and leaves the other out; a trainer that lists both names the extra ones in `tied`, and they are
    dropped here. The engine restores the tie by itself and the probe reads both of its uses.
    """
    dropped = set(tied)
    kept = [meta for meta in metas if meta.name not in dropped]
    return UpdateInfo(
        version=version,
        dtype=dtype,
        mode=mode,
        bucket_bytes=bucket_mb * MIB,
        names=[meta.name for meta in kept],
        shapes=[list(meta.shape) for meta in kept],
        timeout_seconds=timeout_seconds,
        tied=sorted(dropped),
    )


def plan_buckets(update: UpdateInfo) -> list[Bucket]:
    """The buckets of a sync, in the order of sending.

    `flattened_bucket` fills each bucket up to `bucket_bytes`; `per_tensor` gives every tensor a bucket of its own.
    """
    item = ITEM_BYTES[update.dtype]
    step = ALIGNMENT_BYTES // item
    limit = update.bucket_bytes // item if update.mode == "flattened_bucket" else 0
    return list(_fill(update.metas, limit, step))


def _fill(metas: list[TensorMeta], limit: int, step: int) -> Iterator[Bucket]:
    """Greedy filling in order; offsets are multiples of `step` elements, a bucket ends before it passes `limit`."""
    entries: list[BucketEntry] = []
    used = 0
    for meta in metas:
        offset = -(-used // step) * step
        if entries and offset + meta.numel > limit:
            yield Bucket(tuple(entries), used)
            entries, offset = [], 0
        entries.append(BucketEntry(meta.name, meta.shape, offset, meta.numel))
        used = offset + meta.numel
    if entries:
        yield Bucket(tuple(entries), used)
