"""The row that the trainer compiles with before there is any data.

Owns its shape: as long as the longest rows of a run, so that the kernels and the memory of a step are met, and of
several segments. What it holds has no meaning.
"""

from __future__ import annotations

import numpy as np

from telescope.trainer.batch import MicroBatch, TrainSample
from telescope.trainer.packing import lay_out

NUM_SHORT = 3
"""Segments of a sixth of the row; one more has the rest."""
MIN_TOKENS = 12
"""Two tokens for each short segment and more for the long one, for the shortest `seq_len`."""


def warm_up_row(seq_len: int, pad_to_multiple_of: int, vocab_size: int) -> MicroBatch:
    """A row as long as those that are packed can be, of which all tokens are predicted that can be."""
    total = max(seq_len // pad_to_multiple_of * pad_to_multiple_of, MIN_TOKENS)
    short = total // 6
    return lay_out([_sample(size, vocab_size) for size in (total - NUM_SHORT * short, *[short] * NUM_SHORT)])


def _sample(length: int, vocab_size: int) -> TrainSample:
    trained_L = np.ones(length, dtype=bool)
    trained_L[0] = False
    return TrainSample(
        sample_id="warm-up",
        group_id=0,
        environment="warm-up",
        # Many tokens, so that a mixture of experts uses many of them.
        token_ids_L=np.arange(length) % vocab_size,
        trained_L=trained_L,
        engine_logprob_L=np.zeros(length),
        version_L=np.zeros(length, dtype=np.int32),
        reward=0.0,
    )
