"""What the log of a starting engine shows: its stage, and the message of a failed start, the fix first."""

from pathlib import Path

import pytest

from telescope.inference.vllm.start_log import FIRST_STAGE, NUM_LINES, error_lines, start_failure, start_stage

LOG = Path("/runs/demo/logs/inference-0.log")
BANNER = "(APIServer pid=28802) INFO 11-21 18:36:17 [api_utils.py:347]   \u2588\u2584\u2588\u2580 version 0.32.0\r"
TRACEBACK = """\
Found duplicate keys --middleware
/venv/vllm/entrypoints/openai/api_server.py:24: DeprecationWarning: `vllm.entrypoints` is deprecated and will go
  warnings.warn(
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/venv/vllm/entrypoints/launchers/launcher.py", line 348, in create_server_socket
    sock.bind(addr)
    ^^^^^^^^^^^^^^^
OSError: [Errno 98] Address already in use
telescope: process 28802 ended with exit code 1""".splitlines()


def test_a_traceback_is_reduced_to_its_error() -> None:
    message = start_failure(
        "inference server 0 (http://127.0.0.1:8100)",
        "ended with exit code 1",
        [*[BANNER] * 40, *TRACEBACK],
        LOG,
        ended=True,
    )
    assert message.splitlines() == [
        "inference server 0 (http://127.0.0.1:8100) ended with exit code 1. Likely fix: the port is in use: change "
        "inference_base_port",
        "Its log:",
        "  OSError: [Errno 98] Address already in use",
        f"Log: {LOG}",
    ]


def test_the_cause_comes_before_the_errors_that_follow() -> None:
    core, api = "(EngineCore pid=7) ERROR 11-21 18:36:17 [core.py:1130] ", "(APIServer pid=8) "
    log = [
        f"{core}EngineCore failed to start.",
        f"{core}Traceback (most recent call last):",
        f'{core}  File "/venv/vllm/v1/engine/core.py", line 1104, in run_engine_core',
        f"{core}    raise ValueError(",
        f"{core}\x1b[31mValueError: the model is odd\x1b[0m",
        "(EngineCore pid=7) ValueError: the model is odd",
        f"{api}Traceback (most recent call last):",
        f"{api}    raise RuntimeError(",
        f"{api}RuntimeError: Engine core initialization failed.",
    ]
    assert error_lines(log) == [
        "EngineCore failed to start.",
        "ValueError: the model is odd",
        "RuntimeError: Engine core initialization failed.",
    ]


def test_without_a_known_error_all_lines_but_progress_are_shown() -> None:
    assert error_lines([BANNER, "usage: api_server.py", "api_server.py: error: unrecognized arguments: --x"]) == [
        "usage: api_server.py",
        "api_server.py: error: unrecognized arguments: --x",
    ]


def test_a_hanging_server_shows_its_newest_lines() -> None:
    log = [f"(APIServer pid=8) INFO 11-21 18:36:17 [loader.py:1] \x1b[32mshard {number}\x1b[0m" for number in range(50)]
    message = start_failure("inference server 1 (u)", "did not answer within 900 s", log, LOG, ended=False)
    assert len(message.splitlines()) == NUM_LINES + 3
    assert message.splitlines()[-2].endswith("shard 49")
    assert "\x1b" not in message


def test_a_silent_server_still_has_its_log_named() -> None:
    message = start_failure("inference server 0 (u)", "was killed by SIGKILL", [], LOG, ended=True)
    assert message == f"inference server 0 (u) was killed by SIGKILL\nLog: {LOG}"


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
