"""What the log of a starting vLLM tells: the current stage, or why it failed.

A failure is shown as what failed, the likely fix, the one or two relevant log lines, and the path of the log. A line of
no known stage is ignored, so another version of vLLM shows fewer stages and no noise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from telescope.utils.text import plain, single_line

HINTS = (
    (r"[Aa]ddress already in use", "the port is in use: change inference_base_port"),
    (
        r"No available memory for the cache blocks|KV cache is needed, which is larger|max seq len .* is larger than",
        "the KV cache is too small for one sequence: lower max_model_len, or raise gpu_memory_utilization (on the CPU: "
        "inference_kv_cache_gib)",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|less than desired GPU memory utilization",
        "the GPU is full: lower gpu_memory_utilization or max_num_seqs, or stop other processes on it",
    ),
    (
        r"inference_quantization needs GPUs with FP8",
        "set inference_quantization to none, or use GPUs of compute capability 8.9 or more",
    ),
    (r"does not support LoRA yet", 'vLLM has no adapters for this model: set lora_sync to "merged"'),
    (r"weight_transfer is background, but", "set weight_transfer to auto or in_place"),
    (
        r"`trust_remote_code=True`|`--trust-remote-code`",
        "the model ships its own code: read it, then set trust_remote_code: true",
    ),
    (r"User-specified max_model_len", "the model does not support that length: lower max_model_len"),
    (
        r"Repository Not Found|is not a valid model identifier|not a local folder|LocalEntryNotFoundError|OfflineMode|"
        r"Repo id must be",
        "the model cannot be found: check `model` (a folder, or a hub id that is cached or reachable)",
    ),
    (r"[Ii]nvalid tool call parser", "this vLLM does not have that vllm_tool_call_parser"),
    (r"[Ii]nvalid reasoning parser", "this vLLM does not have that vllm_reasoning_parser"),
    (r"Bfloat16 is only supported|float16 is not supported|dtype .* is not supported", "set inference_dtype: float32"),
    (r"unrecognized arguments", "this vLLM does not support a flag that Telescope uses: install the pinned version"),
    (r"No module named 'telescope", "vLLM's Python cannot import telescope: install it into the same environment"),
)


def hint_for(log: str) -> str | None:
    """Returns the fix for a failed start by its log."""
    return next((hint for pattern, hint in HINTS if re.search(pattern, log)), None)


NUM_LINES = 5

_PREFIX = re.compile(r"^(?:\([\w-]+ pid=\d+\) )?(?:(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")
_NOT_TELLING = re.compile(
    r"\s|$|Traceback \(most|During handling of the above|The above exception was|\S*:\d+: \w*Warning: |"
    r"telescope: engine process \d+ (?:ended|was killed)"
)
_ERROR = re.compile(r"[\w.]*(?:Error|Exception)\b")


def start_failure(name: str, what: str, log: Sequence[str], log_path: Path, *, ended: bool) -> str:
    """Returns the message; its first line is complete by itself. `ended`: the process exited, so its log says why."""
    first = f"{name} {what}"
    hint = hint_for("\n".join(log))
    if hint is not None:
        first += f". Likely fix: {hint}"
    lines = (error_lines(log) if ended else []) or [line for line in log if line.strip()][-NUM_LINES:]
    parts = [first]
    if lines:
        parts += ["Its log:", *(f"  {single_line(line)}" for line in lines)]
    return "\n".join([*parts, f"Log: {log_path}"])


def error_lines(log: Sequence[str]) -> list[str]:
    """Returns the last distinct error lines of a log.

    Leaves out vLLM's prefixes, traceback frames, progress, the banner, and lines before the first error.
    """
    found: dict[str, None] = {}
    seen_error = False
    for line in log:
        text = plain(line)
        prefix = _PREFIX.match(text)
        assert prefix is not None  # every part of it is optional
        text = text[prefix.end() :]
        if prefix[1] in ("DEBUG", "INFO", "WARNING") or _NOT_TELLING.match(text):
            continue
        if not seen_error and (prefix[1] is not None or _ERROR.match(text)):
            seen_error = True
            found.clear()
        found.setdefault(text.rstrip())
    return list(found)[-NUM_LINES:]


FIRST_STAGE = "loading libraries"

STAGES = (
    (r"Initializing a V\d LLM engine|vLLM API server version", "starting the engine"),
    (r"Starting to load model|Loading weights|Loading safetensors checkpoint", "loading the weights"),
    (r"Loading weights took|Model loading took", "weights loaded"),
    (r"torch\.compile takes|Dynamo bytecode|Compiling a graph", "compiling"),
    (r"KV cache|cache blocks|Maximum concurrency", "allocating the KV cache"),
    (r"[Cc]apturing (CUDA )?graph|Graph capturing", "capturing CUDA graphs"),
    (r"init engine .*took|Starting vLLM (API )?server|Started server process|Application startup", "opening the API"),
)
"""Patterns of log lines of vLLM 0.26 to 0.32 and their stages; the last match of a line counts."""

_SHARE = re.compile(r"(\d+)% Completed")


def start_stage(lines: Sequence[str], last: str = FIRST_STAGE) -> str:
    """Returns the stage of the newest matching line. `last` when no line matches."""
    for line in reversed(lines):
        for pattern, stage in reversed(STAGES):
            if re.search(pattern, line):
                share = _SHARE.search(line)
                return f"{stage}, {share[1]} %" if share else stage
    return last
