"""Token ids of the generated texts, and a tokenizer file that turns them back into text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from telescope.testing.demo_run.tasks import EOS, Answer, Problem

PIECE = re.compile(r"<\|im_(?:start|end)\|>|</?\w+>| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d<]+| ?<|\s+")
"""A token: a special one, a tag, a word with its blank, a digit, signs, or white space."""


@dataclass(slots=True)
class EncodedPart:
    """Token ids of an answer and of the environment's messages before it."""

    ids_N: np.ndarray
    added: list[int]
    logprobs_N: np.ndarray


class Vocabulary:
    """Gives every piece of the problems' texts an id."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._ids: dict[str, int] = {"<unk>": 0}
        self.prompts = {id(problem): self.encode(problem.prompt) for problem in problems}
        chosen = np.random.default_rng(0)
        self.parts: dict[int, list[EncodedPart]] = {}
        for problem in problems:
            for answer in (*problem.right, *problem.wrong, problem.looping):
                self.parts[id(answer)] = self._encode_answer(answer, chosen)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        return [self._ids.setdefault(piece, len(self._ids)) for piece in PIECE.findall(text)]

    def write(self, folder: Path) -> None:
        """Writes `tokenizer.json`, which the token view of the dashboard reads."""
        model = {"type": "WordLevel", "vocab": self._ids, "unk_token": "<unk>"}
        names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor")
        value: dict[str, object] = {**dict.fromkeys(names), "version": "1.0", "added_tokens": [], "model": model}
        value["decoder"] = {"type": "Fuse"}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(value))

    def _encode_answer(self, answer: Answer, chosen: np.random.Generator) -> list[EncodedPart]:
        parts = []
        for part in answer.parts:
            said = "".join(f"<|im_start|>{role}\n{text}{EOS}\n<|im_start|>assistant\n" for role, text in part.replies)
            ids = np.array(self.encode(part.text + EOS), dtype=np.int32)
            # Most tokens are nearly certain; a few decide how the answer goes on.
            surprise = np.exp(chosen.normal(-4.0, 1.2, len(ids))) + (chosen.random(len(ids)) < 0.12) * chosen.gamma(
                2, 0.6
            )
            parts.append(EncodedPart(ids, self.encode(said), -surprise.astype(np.float32)))
        return parts
