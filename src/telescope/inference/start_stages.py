"""What a starting vLLM is doing, in a few words, from the lines of its log.

The log itself belongs in its file: for a live view its lines are too long, too many, and not about the run. A line
that no stage knows says nothing, so that another version of vLLM shows fewer stages and no noise. Pure text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

FIRST_STAGE = "loading libraries"

STAGES = (
    (r"Initializing a V\d LLM engine|vLLM API server version", "starting the engine"),
    (r"Starting to load model|Loading weights|Loading safetensors checkpoint", "loading the weights"),
    (r"Loading weights took|Model loading took", "weights loaded"),
    (r"torch\.compile takes|Dynamo bytecode|Compiling a graph", "compiling"),
    (r"KV cache|cache blocks|Maximum concurrency", "making the KV cache"),
    (r"[Cc]apturing (CUDA )?graph|Graph capturing", "capturing CUDA graphs"),
    (r"init engine .*took|Starting vLLM (API )?server|Started server process|Application startup", "opening the API"),
)
"""What a line of vLLM 0.26 to 0.32 holds, and what that means; the last that fits a line counts."""

_SHARE = re.compile(r"(\d+)% Completed")


def start_stage(lines: Sequence[str]) -> str | None:
    """The stage that the newest telling line of a log shows; None when no line tells."""
    for line in reversed(lines):
        for pattern, stage in reversed(STAGES):
            if re.search(pattern, line):
                share = _SHARE.search(line)
                return f"{stage}, {share[1]} %" if share else stage
    return None
