"""One tiny model from settings to a directory in Hugging Face form.

Owns the order of the parts and the files that come out; where the directory lies and whether it is kept is the
cache's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from telescope.tiny_model.architecture import build_model
from telescope.tiny_model.examples import examples_of, markup_of
from telescope.tiny_model.settings import TinyModelSettings
from telescope.tiny_model.tokenizer import build_tokenizer
from telescope.tiny_model.warm_start import WarmStartProgress, warm_start

_NUM_CORPUS_PROMPTS = 64


def build_tiny_model(
    output: Path, settings: TinyModelSettings, report: Callable[[WarmStartProgress], None] | None = None
) -> int:
    """Write config, safetensors, tokenizer and generation config into the existing folder `output`.

    Returns the number of parameters.
    """
    source = examples_of(settings)
    examples = [source.draw(wrong_share=0.0) for _ in range(_NUM_CORPUS_PROMPTS)]
    corpus = [str(message["content"]) for example in examples for turn in example.turns for message in turn.messages]
    tokenizer = build_tokenizer(corpus, settings.vocab_size, markup_of(settings))
    model = build_model(settings, tokenizer)
    warm_start(model, tokenizer, settings, report)
    with _no_progress_bars():
        model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    _name_tokenizer_class_for_all_versions(output)
    for path in output.iterdir():
        path.chmod(0o644)  # safetensors writes for its owner alone, and a cache may be shared
    return int(model.num_parameters())


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """A bar for writing four megabytes tells nobody anything, and stdout and stderr belong to the caller."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _name_tokenizer_class_for_all_versions(folder: Path) -> None:
    """`transformers` 5 writes the name of a base class that 4 does not know; both know, and use, Qwen2's."""
    path = folder / "tokenizer_config.json"
    tokenizer_config = json.loads(path.read_text())
    tokenizer_config["tokenizer_class"] = "Qwen2Tokenizer"
    path.write_text(json.dumps(tokenizer_config, indent=2) + "\n")
