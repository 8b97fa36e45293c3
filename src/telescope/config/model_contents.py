"""Checks a tokenizer, and that weight files are complete and not quantized.

Pure functions of parsed JSON and of the files' first bytes; no weights are read. `model_files` finds the files and
words the errors. `trainer.trial` compares the tensors with the architecture.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # limit of the format: https://github.com/huggingface/safetensors#format

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that are not quantized, as a safetensors header names them."""


class StoredTensor(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str
    shape: tuple[int, ...]


def safetensors_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors in a safetensors file by name. Reads the header only.

    The format: the header's length as an unsigned 64-bit little-endian number, the header as a JSON object of
    `{name: {dtype, shape, data_offsets: [begin, end]}}`, and the data, which the offsets count from 0.

    Raises `ValueError` with the reason when the file cannot hold what its header lists.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(HEADER_LENGTH_BYTES)
        if len(prefix) < HEADER_LENGTH_BYTES:
            raise ValueError(f"it has {num_bytes} bytes, which is no safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES or HEADER_LENGTH_BYTES + length > num_bytes:
            raise ValueError(
                f"its header would take {length:,} bytes, and the file has {num_bytes:,}: it is cut off or damaged"
            )
        text = file.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
        tensors = {
            name: StoredTensor(str(entry["dtype"]), tuple(map(int, entry["shape"]))) for name, entry in entries.items()
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ValueError("its header does not follow the format: it is damaged, or no safetensors file") from None
    wanted = HEADER_LENGTH_BYTES + length + max(ends, default=0)
    if num_bytes < wanted:
        raise ValueError(f"its header lists {wanted:,} bytes, and the file has {num_bytes:,}: it is cut off")
    return tensors


def largest_token_id(tokenizer: Mapping[str, Any], tokenizer_config: Mapping[str, Any], template: str) -> int | None:
    """Returns the largest token id of a valid tokenizer.json; None if unknown.

    That is the largest of the vocabulary, of the special tokens, and of the added tokens that the chat template writes.
    Other added tokens do not count: models for text may keep some of their relatives for images, beyond their own
    vocabulary.
    """
    vocabulary = tokenizer["model"]["vocab"]
    ids: list[int] = []
    if isinstance(vocabulary, Mapping):
        ids += [number for number in vocabulary.values() if isinstance(number, int)]
    elif isinstance(vocabulary, list):  # a unigram model: the id is the position
        ids.append(len(vocabulary) - 1)
    special = {token_text(tokenizer_config.get(name)) for name in SPECIAL_TOKENS}
    for entry in tokenizer.get("added_tokens") or []:
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), int) and isinstance(entry.get("content"), str):
            text = entry["content"]
            if text in special or (text and text in template):
                ids.append(entry["id"])
    return max(ids, default=None)


def token_text(token: Any) -> str | None:
    """Returns a special token's text, given as text or object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
