"""The command and environment that start a vLLM process."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tests.model_folder import write_model_folder

from telescope.config import TelescopeConfig, load_config
from telescope.config.memory import cpu_kv_cache_gib
from telescope.config.model_shape import ModelShape
from telescope.config.model_source import read_config
from telescope.errors import ConfigError, UserError
from telescope.inference.auth import SECRET_VARIABLE
from telescope.inference.base import Address, LaunchCommand
from telescope.inference.vllm.engine_health import CALL_LIMIT_VARIABLE, STEP_LIMIT_VARIABLE
from telescope.inference.vllm.launch import launch_command, shape_of
from telescope.inference.vllm.plugin import TRANSFER_VARIABLE
from telescope.inference.vllm.policy_version import REQUIRE_UPDATE_VARIABLE
from telescope.inference.vllm.start_log import hint_for
from telescope.inference.vllm.step_meter import STEP_METER_VARIABLE

ADDRESS = Address(0, "127.0.0.1", 8100, "a-run-secret")


@pytest.fixture(autouse=True)
def hub_cache(tmp_path_factory, monkeypatch) -> Path:
    """Returns an empty cache of the hub. The hub itself cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
    return Path(constants.HF_HUB_CACHE)


def config(**fields: Any) -> TelescopeConfig:
    overrides = ["--environments", '[{"name": "countdown"}]']
    for name, value in fields.items():
        overrides += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return load_config(None, overrides).config


def launch(directory: Path, version: str = "0.32.0", model: str = "/models/m", **fields: Any) -> LaunchCommand:
    given = {name: fields.pop(name) for name in ("restarted", "gpu_memory_bytes") if name in fields}
    given["on_cpu"] = fields.pop("on_cpu", True)
    return launch_command(config(**fields), ADDRESS, model=model, directory=directory, vllm_version=version, **given)


def launch_on_gpu(directory: Path, model: str, memory_bytes: int | None, **fields: Any) -> LaunchCommand:
    return launch(directory, "0.26.0", model, on_cpu=False, gpu_memory_bytes=memory_bytes, **fields)


def value_of(command: LaunchCommand, flag: str) -> str:
    return command.arguments[command.arguments.index(flag) + 1]


def given(command: LaunchCommand, name: str) -> Any:
    """The value of a flag, True if it has none, or of a variable; None if it is not there."""
    if not name.startswith("--"):
        return command.environment.get(name)
    if name not in command.arguments:
        return None
    value = next(iter(command.arguments[command.arguments.index(name) + 1 :]), "--")
    return True if value.startswith("--") else value


GPU: dict[str, Any] = {"on_cpu": False}
FOUR: dict[str, Any] = {"inference_tensor_parallel_size": 4, "inference_num_workers": 4}
TWO: dict[str, Any] = {"inference_tensor_parallel_size": 2, "inference_num_workers": 2}
EAGER, CHUNKS, BATCH = "--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens"
SLOTS, DTYPE, REMOTE = "--max-num-seqs", "--dtype", "--trust-remote-code"
PROCESS, CACHE, THREADS = "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS"
STEP = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
CHAT = {
    "chat_template": "{{ messages }}", "enable_thinking": True, "vllm_tool_call_parser": "hermes",
    "vllm_reasoning_parser": "qwen3",
}  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), [
    (GPU, {STEP_LIMIT_VARIABLE: "300.0", STEP: "300"}), ({}, {STEP_LIMIT_VARIABLE: "600.0", STEP: "600"}),
    (GPU | {"inference_hang_timeout_seconds": 20.5}, {STEP_LIMIT_VARIABLE: "20.5", STEP: "21"}),
    ({"weight_sync_timeout_seconds": 77.0}, {CALL_LIMIT_VARIABLE: "77.0"}),
    ({}, {"--logprobs-mode": "processed_logprobs", SECRET_VARIABLE: "a-run-secret"}),
    ({"lora_rank": 20}, {"--enable-lora": None}),
    ({"lora_rank": 20, "lora_sync": "adapter"}, {"--max-lora-rank": "32", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}),
    ({}, {DTYPE: "bfloat16"}), ({"inference_dtype": "float32"}, {DTYPE: "float32"}),
    ({"mixed_precision_dtype": None, "model_dtype": "float16"}, {DTYPE: "float16"}),
    ({"max_concurrent_prompts_per_server": 512, "group_size": 8}, {SLOTS: "4096", BATCH: "4096"}),
    ({"max_num_seqs": 5}, {SLOTS: "5"}),
    ({"max_model_len": 5000}, {CHUNKS: True, BATCH: "5000"}), (GPU, {CHUNKS: None, BATCH: None}),
    ({}, {"--disable-uvicorn-access-log": True, "--no-enable-log-requests": True, "--no-log-error-stack": True}),
    ({}, {EAGER: True}), ({"inference_enforce_eager": False}, {EAGER: None}),
    (GPU, {EAGER: None}), (GPU | {"inference_enforce_eager": True}, {EAGER: True}),
    ({"inference_kv_cache_gib": 1.5, "inference_threads": 1},
     {CACHE: "2", THREADS: "1", "--gpu-memory-utilization": None}),
    ({"inference_kv_cache_gib": 6, **TWO}, {CACHE: "3", PROCESS: None}), ({}, {PROCESS: "0"}),
    (GPU | {"gpu_memory_utilization": 0.5}, {"--gpu-memory-utilization": "0.5", THREADS: None, PROCESS: None}),
    ({}, {REMOTE: None}), ({"trust_remote_code": True}, {REMOTE: True}),
    ({}, {REQUIRE_UPDATE_VARIABLE: None}), ({"restarted": True}, {REQUIRE_UPDATE_VARIABLE: "1"}),
    ({}, {"--chat-template": None, "--tool-call-parser": None, "--reasoning-parser": None,
          "--default-chat-template-kwargs": '{"enable_thinking": false}'}),
    (CHAT, {"--tool-call-parser": "hermes", "--enable-auto-tool-choice": True, "--reasoning-parser": "qwen3",
            "--default-chat-template-kwargs": '{"enable_thinking": true}'}),
    (GPU | TWO, {"--tensor-parallel-size": "2", "--distributed-executor-backend": "mp"}),
    ({"weight_transfer": "background"}, {TRANSFER_VARIABLE: "background"}),
    ({"version": "0.32.0"}, {"--enable-scale-out": True}), ({"version": "0.30.1"}, {"--enable-scale-out": True}),
    ({"version": "0.29.0"}, {"--enable-scale-out": None, "VLLM_ENABLE_SCALE_OUT_ENDPOINTS": "1"}),
])  # fmt: skip
def test_flags_and_variables_follow_config_device_and_version(tmp_path, fields, expected):
    command = launch(tmp_path, **fields)
    assert {name: given(command, name) for name in expected} == expected


def test_a_version_outside_the_supported_ones_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"0\.26 to 0\.32"):
        launch(tmp_path, "0.25.0")


def test_the_secret_is_no_argument(tmp_path):
    assert not any("a-run-secret" in argument for argument in launch(tmp_path).arguments)


def test_the_secret_check_is_the_outermost_middleware(tmp_path):
    arguments = launch(tmp_path).arguments
    given = [arguments[i + 1] for i, argument in enumerate(arguments) if argument == "--middleware"]
    assert given[-1] == "telescope.inference.auth.RunSecretMiddleware"  # vLLM adds them inside out


def test_a_wrapper_is_served_for_text_alone(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for config_json, has_flag in (
        ({"model_type": "gemma3", "text_config": {}}, True),
        ({"model_type": "llama"}, False),
    ):
        (model / "config.json").write_text(json.dumps(config_json))
        command = launch_on_gpu(tmp_path, str(model), None)
        assert ("--limit-mm-per-prompt" in command.arguments) is has_flag
        assert not has_flag or set(json.loads(value_of(command, "--limit-mm-per-prompt")).values()) == {0}


@pytest.mark.parametrize(("fields", "flag"), [
    ({"model_type": "gemma3", "text_config": {}}, "--limit-mm-per-prompt"),
    ({"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 64}, "--moe-backend"),
    ({"max_position_embeddings": 4096}, "--gpu-memory-utilization"),
])  # fmt: skip
def test_a_hub_model_is_served_like_its_folder(fields, flag, tmp_path, hub_cache):
    folder = write_model_folder(tmp_path / "m", **fields)
    snapshots = hub_cache / "models--some--model" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "abc").symlink_to(folder)
    (snapshots.parent / "refs").mkdir()
    (snapshots.parent / "refs" / "main").write_text("abc")
    from_hub, local = (launch_on_gpu(tmp_path, model, 1 << 30) for model in ("some/model", str(folder)))
    assert value_of(from_hub, flag) == value_of(local, flag)
    assert from_hub.environment == local.environment


def test_the_workers_of_a_server_meet_on_loopback(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    shape = {"inference_tensor_parallel_size": 2, "inference_num_workers": 2}
    assert launch(tmp_path, **shape).environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in launch(tmp_path).environment
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth3")
    assert "GLOO_SOCKET_IFNAME" not in launch(tmp_path, **shape).environment


def test_experts_on_a_gpu_keep_their_loaded_layout(tmp_path):
    model = write_model_folder(tmp_path / "m", model_type="qwen3_moe", num_experts=4, moe_intermediate_size=64)
    assert value_of(launch_on_gpu(tmp_path, str(model), None), "--moe-backend") == "triton"
    dense = write_model_folder(tmp_path / "dense")
    assert "--moe-backend" not in launch_on_gpu(tmp_path, str(dense), None).arguments


def test_a_chat_template_reaches_the_server_as_a_file(tmp_path):
    assert Path(value_of(launch(tmp_path, **CHAT), "--chat-template")).read_text() == "{{ messages }}"


def test_the_users_own_vllm_plugins_stay_enabled(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "theirs")
    assert launch(tmp_path).environment["VLLM_PLUGINS"] == "theirs,telescope"
    monkeypatch.delenv("VLLM_PLUGINS")
    assert "VLLM_PLUGINS" not in launch(tmp_path).environment


def test_every_engine_counts_its_steps_into_a_file_of_its_own(tmp_path):
    command = launch(tmp_path)
    module, _, name = value_of(command, "--scheduler-cls").rpartition(".")
    spec = importlib.util.find_spec(module)
    assert f"def {name}(" in Path(str(spec.origin)).read_text()
    assert command.environment[STEP_METER_VARIABLE] == str(tmp_path / "steps-8100")


def test_the_cpu_kv_cache_fits_all_slots_but_leaves_most_memory():
    fields = {"max_model_len": 1024, "max_tokens": 512, "inference_dtype": "float32", "max_num_seqs": 64}
    shape = ModelShape(400, 128, 512, 4, 2, 32, 384, True)
    per_token = 2 * 400 * 2 * 32 * 4
    for run, heads in ((config(**fields), 2), (config(**fields, **TWO), 1), (config(**fields, **FOUR), 1)):
        workers = run.inference_tensor_parallel_size
        assert cpu_kv_cache_gib(run, shape, 2**40) == math.ceil(per_token * heads / 2 * 1024 * 64 / 2**30)
        assert cpu_kv_cache_gib(run, shape, 2**34) == 4 // workers
        assert cpu_kv_cache_gib(run, None, 2**40) == 4 // workers
    assert cpu_kv_cache_gib(config(**fields, inference_kv_cache_gib=3), shape, 2**26) == 3


def test_shape_of_a_nested_and_of_an_absent_model():
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 2}
    shape = shape_of("m", {"model_type": "x", "text_config": sizes})
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (3, 2, 32)
    for model in ("someone/some-model", "./nowhere"):
        assert shape_of(model, read_config(model)) is None


@pytest.mark.parametrize(("log", "fix"), [
    ("OSError: [Errno 98] Address already in use", "inference_base_port"),
    ("ValueError: No available memory for the cache blocks. Try", "gpu_memory_utilization"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "gpu_memory_utilization"),
    ("huggingface_hub.errors.RepositoryNotFoundError: Repository Not Found for url", "model"),
    ("ValueError: User-specified max_model_len (9999) is greater than the derived", "max_model_len"),
    ("on kv cache allocation is less than requested memory for kv (8.0/8.0 GiB). Decrease", "inference_kv_cache_gib"),
    ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable", "gcc"),
    ("/tmp/tmpx/cuda_utils.c:5:10: fatal error: Python.h: No such file or directory", "python3-dev"),
    ("KeyError: 'invalid tool call parser: x", "vllm_tool_call_parser"),
    ("please pass the argument `trust_remote_code=True`", "trust_remote_code"),
    ("ValueError: inference_quantization needs GPUs with FP8; this one has (8, 0)", "inference_quantization"),
])  # fmt: skip
def test_known_failures_name_the_field_to_change(log, fix):
    assert fix in str(hint_for(f"INFO something\n{log}\nmore"))


def test_an_unknown_failure_gets_no_invented_hint():
    assert hint_for("Segmentation fault") is None


@pytest.mark.parametrize("line", [
    "Initializing a V1 LLM engine (v0.26.0) with config: model='m', trust_remote_code=False, dtype=torch.bfloat16",
    "Free memory on device (139.29/139.8 GiB) on startup. Desired GPU memory utilization is (0.85, 119.28 GiB).",
])  # fmt: skip
def test_what_every_start_logs_explains_no_failure(line):
    assert hint_for(f"{line}\nSegmentation fault") is None
    full = "ValueError: Free memory on device cuda:0 (2/80 GiB) on startup is less than desired GPU memory utilization"
    assert "gpu_memory_utilization" in str(hint_for(f"{line}\n{full}"))


def test_memory_for_the_staging_buffer_is_kept_free_of_kv_cache(tmp_path):
    command = launch_on_gpu(tmp_path, "Qwen/Qwen3-4B", 140 << 30)
    second_copy = 2 * 4_022_468_096 + 2 * 151936 * 2560 + (256 << 20)
    assert float(value_of(command, "--gpu-memory-utilization")) == pytest.approx(0.9 - second_copy / (140 << 30), 1e-3)
    assert command.environment[TRANSFER_VARIABLE] == "auto"


def test_a_server_gets_the_reason_for_weights_in_place(tmp_path):
    for command in (
        launch_on_gpu(tmp_path, "acme/unknown", 140 << 30),
        launch_on_gpu(tmp_path, "Qwen/Qwen3-4B", None),
        launch_on_gpu(tmp_path, "Qwen/Qwen3-14B", 80 << 30),
    ):
        assert value_of(command, "--gpu-memory-utilization") == "0.9"
        assert command.environment[TRANSFER_VARIABLE].startswith("in_place: ")
    chosen = launch_on_gpu(tmp_path, "Qwen/Qwen3-4B", 140 << 30, weight_transfer="in_place")
    assert chosen.environment[TRANSFER_VARIABLE] == "in_place"
    assert value_of(chosen, "--gpu-memory-utilization") == "0.9"


def test_a_staging_buffer_that_leaves_no_kv_cache_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds 0 tokens.*in_place, which saves 30\.4 GiB"):
        launch_on_gpu(tmp_path, "Qwen/Qwen3-14B", 66 << 30, weight_transfer="background")


def test_quantization_is_passed_on_with_kernels_that_keep_scales_readable(tmp_path):
    chosen = {"inference_quantization": "fp8_per_block", "inference_dtype": "bfloat16"}
    command = launch_on_gpu(tmp_path, "Qwen/Qwen3-4B", 140 << 30, **chosen)
    assert value_of(command, "--quantization") == "fp8_per_block"
    assert command.environment["VLLM_USE_DEEP_GEMM"] == "0"
    assert command.environment[TRANSFER_VARIABLE] == "in_place: the weights are quantized as they arrive"
    assert "--quantization" not in launch_on_gpu(tmp_path, "Qwen/Qwen3-4B", 140 << 30).arguments
    with pytest.raises(ConfigError, match="needs GPUs with FP8"):
        launch(tmp_path, **chosen)


def test_routes_are_asked_for_with_the_runner_that_returns_them(tmp_path):
    command = launch_on_gpu(tmp_path, "Qwen/Qwen3-4B", 140 << 30, router_replay=True)
    assert "--enable-return-routed-experts" in command.arguments
    assert "VLLM_USE_V2_MODEL_RUNNER" not in command.environment, "0.26 returns them from its first runner"
    newer = launch(tmp_path, on_cpu=False, router_replay=True)
    assert newer.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "--enable-return-routed-experts" not in launch(tmp_path).arguments
    with pytest.raises(ConfigError, match="CPU build cannot return routed experts"):
        launch(tmp_path, router_replay=True)
