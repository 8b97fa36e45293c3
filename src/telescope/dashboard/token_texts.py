"""Texts of single tokens for the token view, decoded by the run's tokenizer.

Looks in the run directory, in the folder of the model and in the Hugging Face cache. Downloads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
NUM_TOKENIZERS = 4
"""Tokenizers that are kept in memory; one of a large vocabulary takes about 50 MB."""


def find_tokenizer(run_dir: Path, model: str | None) -> Path | None:
    """Returns the file of the run's tokenizer. None: it is not on this machine."""
    folders = [run_dir / "model", *sorted(run_dir.glob("checkpoints/*/hf_meta"))]
    if model:
        folders.append(Path(model).expanduser())
    for folder in folders:
        if (folder / TOKENIZER).is_file():
            return folder / TOKENIZER
    if not model or Path(model).is_absolute():
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, TOKENIZER)
    except (ImportError, ValueError):  # only runs are read on this machine; or not the name of a model on the Hub
        return None
    return Path(cached) if isinstance(cached, str) else None


def token_texts(path: Path, ids: Sequence[int]) -> list[str] | None:
    """Returns the text of each token, blanks before words included. None: the tokenizer cannot be read."""
    try:
        tokenizer = _load(path, path.stat().st_mtime_ns)
    except Exception:  # tokenizers raises Exception itself for a file that it cannot read
        return None
    texts: list[str] = []
    before = ""
    for place, token in enumerate(ids):
        alone = tokenizer.decode([token], skip_special_tokens=False)
        # Some decoders drop the blank before the first word, so a token is decoded behind the one before it.
        both = tokenizer.decode(list(ids[max(0, place - 1) : place + 1]), skip_special_tokens=False)
        texts.append(both[len(before) :] if both.startswith(before) and len(both) >= len(alone) else alone)
        before = alone
    return texts


@lru_cache(NUM_TOKENIZERS)
def _load(path: Path, _modified: int) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
