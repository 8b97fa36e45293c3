"""The stages of a starting engine, from lines of vLLM's log."""

import pytest

from telescope.inference.vllm.start_log import FIRST_STAGE, start_stage


@pytest.mark.parametrize(("line", "stage"), [
    ("(EngineCore pid=7) [core.py:93] Initializing a V1 LLM engine (v0.26.0) with", "starting the engine"),
    ("(EngineCore pid=7) [gpu_model_runner.py] Starting to load model /models/m...", "loading the weights"),
    ("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01]", "loading the weights, 50 %"),
    ("(EngineCore pid=7) [default_loader.py:267] Loading weights took 0.03 seconds", "weights loaded"),
    ("(EngineCore pid=7) [kv_cache_utils.py:864] GPU KV cache size: 524,288 tokens", "allocating the KV cache"),
    ("(EngineCore pid=7) [core.py] init engine (profile, create kv cache, warmup) took 1 s", "opening the API"),
    ("(APIServer pid=3) INFO:     Application startup complete.", "opening the API"),
])  # fmt: skip
def test_a_line_of_the_log_becomes_a_stage(line, stage):
    assert start_stage([line]) == stage


def test_lines_without_a_stage_are_skipped():
    lines = ["INFO Loading weights took 0.03 seconds", "WARNING Enforce eager set, disabling torch.compile, CUDAGraphs",
             "WARNING something odd about __init__.py:12]", "  ^^^^^"]  # fmt: skip
    assert start_stage(lines) == "weights loaded"
    assert start_stage(lines[1:], "compiling") == "compiling"
    assert start_stage([]) == FIRST_STAGE
