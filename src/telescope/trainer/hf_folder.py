"""Writes model folders in Hugging Face format: weights, index, other files.

The layout of every file follows from the tensors' shapes, so each tensor is written when it arrives, and memory holds
one tensor. The trainer gathers tensors, and `orchestrator.conversion` reads them from a checkpoint.

Invariant: a model folder is complete or absent. It is written under another name and renamed.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from telescope.errors import UserError
from telescope.utils.data import split_by_size
from telescope.weights.model_folder import ModelOrigin, write_origin
from telescope.weights.plan import TensorMeta

MAX_SHARD_BYTES = 5 * 10**9
"""Conventional size of a weight file on the hub."""

DTYPE_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors."""

HEADER_ALIGNMENT = 8
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
PARTIAL = ".unfinished-"
"""Name prefix of an incomplete folder."""


def write_model_folder(
    folder: Path,
    metas: Sequence[TensorMeta],
    tensors: Iterable[tuple[str, torch.Tensor]],
    files: Mapping[str, bytes],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    origin: ModelOrigin | None = None,
) -> None:
    """Writes a model to `folder`, replacing it.

    `tensors` have the order and the dtypes of `metas`. Also writes `files`, and `origin` as `write_origin` does. Calls
    `on_bytes` with the size of each written tensor. Raises `OSError` with the size of the model, before the first byte
    if the disk has too little space.
    """
    num_bytes = sum(map(size_of, metas))
    shards, unwritten = list(split_by_size(metas, size_of, max_shard_bytes)), iter(tensors)
    location: dict[str, str] = {}
    try:
        with new_folder(folder, origin) as partial:
            free = shutil.disk_usage(partial).free
            if free < num_bytes:
                raise OSError(f"the disk has {free / 2**30:.3g} GiB free")
            for number, own in enumerate(shards, 1):
                name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
                location |= dict.fromkeys((meta.name for meta in own), name)
                _write_file(partial / name, own, unwritten, on_bytes)
            if len(shards) > 1:
                index = {"metadata": {"total_size": num_bytes}, "weight_map": location}
                (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
            for name, content in files.items():
                (partial / name).write_bytes(content)
    except OSError as error:
        raise OSError(f"{folder} needs {num_bytes / 2**30:.3g} GiB: {error}") from error


@contextmanager
def new_folder(folder: Path, origin: ModelOrigin | None = None) -> Iterator[Path]:
    """Yields an empty folder that replaces `folder`, or its link's target, when the block ends without an error.

    First removes the remains of killed processes. Raises `OSError`.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f"{PARTIAL}*"):
        with suppress(OSError), _lock(left):  # it is being written, or belongs to another user
            shutil.rmtree(left)
    partial = folder.with_name(f"{PARTIAL}{folder.name}")
    partial.mkdir()
    with _lock(partial):
        try:
            yield partial
            if origin is not None:
                write_origin(partial, origin)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Locks a folder against other processes. Raises `OSError` if another one has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise  # other errors come from file systems without locks
        yield
    finally:
        os.close(descriptor)


def size_of(meta: TensorMeta) -> int:
    """Returns the bytes of a tensor."""
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return meta.numel * dtype.itemsize


def with_dtype(files: Mapping[str, bytes], dtype: str) -> dict[str, bytes]:
    """Returns `files` with the weights' dtype in config.json (`dtype` or `torch_dtype`)."""
    config: dict[str, Any] = json.loads(files[CONFIG])
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    return {**files, CONFIG: (json.dumps(config, indent=2) + "\n").encode()}


def _write_file(
    path: Path, metas: list[TensorMeta], tensors: Iterator[tuple[str, torch.Tensor]], on_bytes: Callable[[int], None]
) -> None:
    """Writes a safetensors file: header length, header in JSON, values. The widest dtype comes first, for alignment."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for meta in sorted(metas, key=lambda meta: -getattr(torch, meta.dtype).itemsize):
        begin, end = end, end + size_of(meta)
        header[meta.name] = {
            "dtype": DTYPE_CODES[meta.dtype], "shape": list(meta.shape), "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for meta in metas:
            name, tensor = next(tensors)
            found = (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            assert found == (meta.name, meta.shape, meta.dtype), f"{found} instead of {meta}"
            file.seek(start + header[name]["data_offsets"][0])
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            on_bytes(size_of(meta))
        file.flush()
        os.fsync(file.fileno())


def parse_size(text: str) -> int:
    """Returns the bytes of `5GB`, `500 MB` or `2GiB`. Raises `UserError`."""
    try:
        return TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text)
    except ValidationError:
        fix = "Give a number and a unit, such as 5GB or 500MB"
        raise UserError(f"{text!r} is not the size of a file. {fix}") from None
