"""The command and environment that start a vLLM process."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.model_folder import write_model_folder

from telescope.config import TelescopeConfig, load_config
from telescope.config.model_shape import ModelShape
from telescope.errors import ConfigError, UserError
from telescope.inference.auth import SECRET_VARIABLE
from telescope.inference.base import Address, LaunchCommand
from telescope.inference.vllm.engine_health import CALL_LIMIT_VARIABLE, STEP_LIMIT_VARIABLE
from telescope.inference.vllm.launch import kv_cache_gib, launch_command, shape_of
from telescope.inference.vllm.plugin import TRANSFER_VARIABLE
from telescope.inference.vllm.policy_version import REQUIRE_UPDATE_VARIABLE
from telescope.inference.vllm.start_log import hint_for
from telescope.inference.vllm.step_meter import STEP_METER_VARIABLE

ADDRESS = Address(0, "127.0.0.1", 8100, "a-run-secret")


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


@pytest.mark.parametrize(("on_cpu", "fields", "seconds"), [
    (False, {}, 300), (True, {}, 600), (False, {"inference_hang_timeout_seconds": 20.5}, 20.5),
])  # fmt: skip
def test_timeouts_of_steps_and_calls_follow_the_config(tmp_path, on_cpu, fields, seconds):
    environment = launch(tmp_path, on_cpu=on_cpu, weight_sync_timeout_seconds=77.0, **fields).environment
    assert float(environment[STEP_LIMIT_VARIABLE]) == seconds
    assert int(environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]) == math.ceil(seconds)
    assert float(environment[CALL_LIMIT_VARIABLE]) == 77


def test_the_secret_travels_in_the_environment_only(tmp_path):
    command = launch(tmp_path)
    assert command.environment[SECRET_VARIABLE] == "a-run-secret"
    assert not any("a-run-secret" in argument for argument in command.arguments)


def test_logprobs_are_those_of_the_sampled_distribution(tmp_path):
    assert value_of(launch(tmp_path), "--logprobs-mode") == "processed_logprobs"


def test_the_secret_check_is_the_outermost_middleware(tmp_path):
    arguments = launch(tmp_path).arguments
    given = [arguments[i + 1] for i, argument in enumerate(arguments) if argument == "--middleware"]
    assert given[-1] == "telescope.inference.auth.RunSecretMiddleware"  # vLLM adds them inside out


def test_a_server_takes_adapters_of_the_next_rank_that_vllm_has(tmp_path):
    assert "--enable-lora" not in launch(tmp_path, lora_rank=20).arguments
    command = launch(tmp_path, lora_rank=20, lora_sync="adapter")
    assert value_of(command, "--max-lora-rank") == "32"
    assert command.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_only_versions_with_the_scale_out_flag_get_it(tmp_path):
    assert "--enable-scale-out" in launch(tmp_path, "0.32.0").arguments
    assert "--enable-scale-out" in launch(tmp_path, "0.30.1").arguments
    older = launch(tmp_path, "0.29.0")
    assert "--enable-scale-out" not in older.arguments
    assert older.environment["VLLM_ENABLE_SCALE_OUT_ENDPOINTS"] == "1"
    with pytest.raises(UserError, match=r"0\.26 to 0\.32"):
        launch(tmp_path, "0.25.0")


def test_the_engine_computes_in_the_runs_inference_dtype(tmp_path):
    assert value_of(launch(tmp_path), "--dtype") == "bfloat16"
    assert value_of(launch(tmp_path, mixed_precision_dtype=None, model_dtype="float16"), "--dtype") == "float16"
    assert value_of(launch(tmp_path, inference_dtype="float32"), "--dtype") == "float32"


def test_the_engine_runs_all_request_slots(tmp_path):
    command = launch(tmp_path, max_concurrent_prompts_per_server=512, group_size=8)
    assert value_of(command, "--max-num-seqs") == "4096"
    assert int(value_of(command, "--max-num-batched-tokens")) >= 4096
    assert "--max-num-batched-tokens" not in launch(tmp_path, on_cpu=False).arguments
    assert value_of(launch(tmp_path, max_num_seqs=5), "--max-num-seqs") == "5"


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


def test_the_log_does_not_grow_with_the_number_of_requests(tmp_path):
    flags = {"--disable-uvicorn-access-log", "--no-enable-log-requests", "--no-log-error-stack"}
    assert flags <= set(launch(tmp_path).arguments)


def test_prompts_are_prefilled_whole_on_the_cpu(tmp_path):
    command = launch(tmp_path, max_model_len=5000)
    assert "--no-enable-chunked-prefill" in command.arguments
    assert int(value_of(command, "--max-num-batched-tokens")) >= 5000
    assert "--no-enable-chunked-prefill" not in launch(tmp_path, on_cpu=False).arguments


def test_eager_on_the_cpu_and_graphs_on_gpus_by_default(tmp_path):
    assert "--enforce-eager" in launch(tmp_path, on_cpu=True).arguments
    assert "--enforce-eager" not in launch(tmp_path, on_cpu=False).arguments
    assert "--enforce-eager" in launch(tmp_path, on_cpu=False, inference_enforce_eager=True).arguments
    assert "--enforce-eager" not in launch(tmp_path, on_cpu=True, inference_enforce_eager=False).arguments


def test_cpu_settings_are_for_the_cpu_and_gpu_settings_for_gpus(tmp_path):
    on_cpu = launch(tmp_path, inference_kv_cache_gib=1.5, inference_threads=1)
    assert on_cpu.environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert on_cpu.environment["OMP_NUM_THREADS"] == "1"
    assert "--gpu-memory-utilization" not in on_cpu.arguments
    on_gpu = launch(tmp_path, on_cpu=False, gpu_memory_utilization=0.5)
    assert value_of(on_gpu, "--gpu-memory-utilization") == "0.5"
    assert "OMP_NUM_THREADS" not in on_gpu.environment


def test_the_only_worker_on_a_cpu_needs_no_process_of_its_own(tmp_path):
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    assert launch(tmp_path, on_cpu=True).environment[name] == "0"
    assert name not in launch(tmp_path, on_cpu=True, inference_tensor_parallel_size=2).environment
    assert name not in launch(tmp_path, on_cpu=False).environment


def test_the_kv_cache_of_a_server_on_the_cpu_is_shared_by_its_workers(tmp_path):
    two = launch(tmp_path, inference_kv_cache_gib=6, inference_tensor_parallel_size=2, inference_num_workers=2)
    assert two.environment["VLLM_CPU_KVCACHE_SPACE"] == "3"


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


def test_remote_code_runs_only_when_asked_for(tmp_path):
    assert "--trust-remote-code" not in launch(tmp_path).arguments
    assert "--trust-remote-code" in launch(tmp_path, trust_remote_code=True).arguments


def test_a_restarted_server_must_be_updated_before_it_samples(tmp_path):
    assert REQUIRE_UPDATE_VARIABLE not in launch(tmp_path).environment
    assert launch(tmp_path, restarted=True).environment[REQUIRE_UPDATE_VARIABLE] == "1"


def test_chat_settings_reach_the_openai_compatible_api(tmp_path):
    command = launch(
        tmp_path, chat_template="{{ messages }}", enable_thinking=True, vllm_tool_call_parser="hermes",
        vllm_reasoning_parser="qwen3",
    )  # fmt: skip
    assert Path(value_of(command, "--chat-template")).read_text() == "{{ messages }}"
    assert json.loads(value_of(command, "--default-chat-template-kwargs")) == {"enable_thinking": True}
    assert value_of(command, "--tool-call-parser") == "hermes"
    assert "--enable-auto-tool-choice" in command.arguments
    assert value_of(command, "--reasoning-parser") == "qwen3"
    plain = launch(tmp_path).arguments
    assert not {"--chat-template", "--tool-call-parser", "--reasoning-parser"} & set(plain)


def test_the_users_own_vllm_plugins_stay_enabled(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "theirs")
    assert launch(tmp_path).environment["VLLM_PLUGINS"] == "theirs,telescope"
    monkeypatch.delenv("VLLM_PLUGINS")
    assert "VLLM_PLUGINS" not in launch(tmp_path).environment


def test_tensor_parallel_workers_are_vllms_own_processes(tmp_path):
    command = launch(tmp_path, on_cpu=False, inference_num_workers=4, inference_tensor_parallel_size=2)
    assert value_of(command, "--tensor-parallel-size") == "2"
    assert value_of(command, "--distributed-executor-backend") == "mp"


def test_every_engine_counts_its_steps_into_a_file_of_its_own(tmp_path):
    command = launch(tmp_path)
    module, _, name = value_of(command, "--scheduler-cls").rpartition(".")
    spec = importlib.util.find_spec(module)
    assert f"def {name}(" in Path(str(spec.origin)).read_text()
    assert command.environment[STEP_METER_VARIABLE] == str(tmp_path / "steps-8100")


def test_the_cpu_kv_cache_fits_all_slots_but_leaves_most_memory():
    fields = {"max_model_len": 1024, "max_tokens": 512, "inference_dtype": "float32", "max_num_seqs": 64}
    shape = ModelShape(4, 128, 512, 4, 2, 32, 384, True)
    per_token = 2 * 4 * 2 * 32 * 4
    assert kv_cache_gib(config(**fields), shape, 2**40) == per_token * 1024 * 64 / 2**30
    assert kv_cache_gib(config(**fields), shape, 2**26) == 2**26 / 4 / 2**30
    assert kv_cache_gib(config(**fields, inference_kv_cache_gib=3), shape, 2**26) == 3
    assert kv_cache_gib(config(**fields), None, 2**40) == 4.0


def test_shape_of_a_nested_and_of_an_absent_model(tmp_path):
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "text_config": sizes}))
    shape = shape_of(str(tmp_path))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (3, 2, 32)
    assert shape_of("someone/some-model") is None


@pytest.mark.parametrize(("log", "fix"), [
    ("OSError: [Errno 98] Address already in use", "inference_base_port"),
    ("ValueError: No available memory for the cache blocks. Try", "gpu_memory_utilization"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "gpu_memory_utilization"),
    ("huggingface_hub.errors.RepositoryNotFoundError: Repository Not Found for url", "model"),
    ("ValueError: User-specified max_model_len (9999) is greater than the derived", "max_model_len"),
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


def test_the_engine_decides_the_weight_transfer_on_a_cpu(tmp_path):
    assert launch(tmp_path, weight_transfer="background").environment[TRANSFER_VARIABLE] == "background"


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
