"""What a tiny model is made from: every number that changes the result, and nothing else.

Owns the settings and the key that names them in the cache. Invariant: two settings with the same key give the same
model on the same machine, because every random choice of the build is drawn from `seed`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from telescope.errors import UserError

RECIPE_VERSION = 1
"""Part of the cache key: raise it when the code makes another model from the same settings."""


@dataclass(frozen=True, slots=True)
class TinyModelSettings:
    """Shape, data and length of the warm start. The defaults are those that `make demo` trains."""

    seed: int = 0
    tied: bool = False
    """Input and output embeddings are one tensor. Weight updates differ between the two kinds, so both are made."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    """Heads are `hidden_size / num_heads` wide; the CPU attention of the engine wants a multiple of 32."""
    num_kv_heads: int = 2
    intermediate_size: int = 512
    vocab_size: int = 384
    max_position_embeddings: int = 2048

    num_numbers: int = 3
    max_number: int = 20
    """Puzzles have `num_numbers` numbers from 1 to `max_number`, to be added and subtracted."""

    warm_start_steps: int = 500
    warm_start_batch_size: int = 128
    """Examples per step: a prompt and its answer, of which the answer is trained."""
    warm_start_learning_rate: float = 2e-3
    wrong_share: float = 0.75
    clean_share: float = 0.7
    """The first `clean_share` of the steps shows right answers only; in the rest, a share of `wrong_share` is in the
    right form and arbitrary otherwise. The model then knows more than it says: its own answers are varied and mostly
    wrong, and reinforcement learning has something to tell apart."""

    def __post_init__(self) -> None:
        """Raises `UserError` for values that cannot make a model."""
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 32:
            raise UserError(
                f"hidden_size {self.hidden_size} over num_heads {self.num_heads} must give heads whose width is a "
                "multiple of 32: change one of the two"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        if not 0.0 <= self.wrong_share <= 1.0:
            raise UserError(f"wrong_share {self.wrong_share} is a share: give a number from 0 to 1")
        if self.warm_start_steps < 0:
            raise UserError(f"warm_start_steps {self.warm_start_steps} is negative: give 0 for an untrained model")
        if self.warm_start_batch_size < 1:
            raise UserError(f"warm_start_batch_size {self.warm_start_batch_size} must be at least 1")

    @property
    def key(self) -> str:
        """16 hexadecimal digits that name these settings under this version of the recipe."""
        text = json.dumps({"recipe": RECIPE_VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
