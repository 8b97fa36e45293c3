"""Builds the command and environment of a vLLM process.

Owns every flag and environment variable that Telescope passes to vLLM, per supported version. `launch_command` is pure
except for reading the model's `config.json`; `server` runs the result. The run's secret is passed only in the
environment.

A server that shares its GPU starts alone on it, and vLLM sizes its KV cache from its measurements under
`gpu_memory_utilization`. At a restart the trainer is there, and two steps of vLLM go wrong (0.26 and 0.32,
`request_memory` and `Worker.determine_available_memory`): it refuses to start when less than `gpu_memory_utilization`
of the whole GPU is free after its CUDA context is created, and it counts memory that the trainer allocates or frees
during profiling as its own, which gives a smaller cache or a failed assertion. So a restart passes the cache size of
the first start, with which vLLM measures nothing, and requires less free memory.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from telescope.config import TelescopeConfig
from telescope.config.lora import SERVED_RANKS
from telescope.config.machine import memory_bytes, num_cores, visible_gpu_memory
from telescope.config.memory import (
    CUDA_CONTEXT_BYTES,
    ENGINE_WORKSPACE_BYTES,
    GIB,
    EngineMemory,
    StagingPlan,
    cpu_kv_cache_gib,
    estimate_memory,
    plan_staging,
)
from telescope.config.model_shape import ModelShape, known_shape
from telescope.config.model_source import read_config
from telescope.errors import ConfigError
from telescope.inference.auth import SECRET_VARIABLE
from telescope.inference.base import Address, LaunchCommand
from telescope.inference.request_tracing import trace_environment
from telescope.inference.vllm import support
from telescope.inference.vllm.engine_health import CALL_LIMIT_VARIABLE, STEP_LIMIT_VARIABLE
from telescope.inference.vllm.plugin import TRANSFER_VARIABLE
from telescope.inference.vllm.policy_version import REQUIRE_UPDATE_VARIABLE
from telescope.inference.vllm.step_meter import STEP_METER_VARIABLE, meter_path

SCALE_OUT_FLAG_SINCE = (0, 30)
"""`--enable-scale-out` opens the token-in-token-out route since 0.30; before, an environment variable did."""

MIDDLEWARES = (
    "telescope.inference.vllm.policy_version.PolicyVersionMiddleware",
    "telescope.inference.vllm.binary_responses.BinaryResponseMiddleware",
    "telescope.inference.vllm.step_meter.StepMetricsMiddleware",
    "telescope.inference.vllm.engine_health.EngineHangMiddleware",
    "telescope.inference.vllm.engine_health.EngineExitMiddleware",
    "telescope.inference.auth.RunSecretMiddleware",
)
"""In vLLM's order: the last one is outermost, so nothing is reached without the secret."""

WORKER_EXTENSION = "telescope.inference.vllm.weights.WeightsWorkerExtension"
SCHEDULER = "telescope.inference.vllm.scheduler.make_scheduler"
DEFAULT_BATCHED_TOKENS = 2048
"""vLLM's smallest default of max_num_batched_tokens; more sequences than that require setting it."""

SERVER_KEEP_ALIVE_SECONDS = 600
"""vLLM closes idle connections after 5 s by default, which races with their reuse by the driver."""

HANG_TIMEOUT_SECONDS = {"cuda": 300.0, "cpu": 600.0}
"""Default of `inference_hang_timeout_seconds`. On GPUs it is vLLM's own limit for a step of several workers. On CPUs a
prompt is prefilled whole: 8,192 tokens of a 1.5B model take some 300 s at 80 GFLOP/s."""


def runs_on_cpu(config: TelescopeConfig) -> bool:
    """Returns whether the engine computes on the CPU. `device` decides, or else the installed build of vLLM."""
    return support.is_cpu_build() if config.device == "auto" else config.device == "cpu"


def hang_timeout(config: TelescopeConfig, *, on_cpu: bool | None = None) -> float:
    """Returns seconds without a response after which an engine is restarted."""
    on_cpu = runs_on_cpu(config) if on_cpu is None else on_cpu
    return config.inference_hang_timeout_seconds or HANG_TIMEOUT_SECONDS["cpu" if on_cpu else "cuda"]


def start_command(
    config: TelescopeConfig, address: Address, *, model: str, directory: Path, earlier_log: Sequence[str] | None
) -> LaunchCommand:
    """Returns the command that starts one server on this machine. Implements `EngineBackend.launch`."""
    on_cpu = runs_on_cpu(config)
    memory = None if on_cpu else min(visible_gpu_memory(), default=None)
    kv_cache_bytes = None
    if earlier_log is not None and config.share_gpus and not on_cpu:
        shape, estimate = shape_of(model, read_config(model)), None
        if shape is not None and memory is not None:
            estimate = estimate_memory(config, shape, device_memory_bytes=memory).engine
        kv_cache_bytes = kv_cache_of_a_restart(earlier_log, estimate)
    return launch_command(
        config,
        address,
        model=model,
        directory=directory,
        vllm_version=support.installed_version(),
        on_cpu=on_cpu,
        restarted=earlier_log is not None,
        gpu_memory_bytes=memory,
        kv_cache_bytes=kv_cache_bytes,
    )


def launch_command(
    config: TelescopeConfig,
    address: Address,
    *,
    model: str,
    directory: Path,
    vllm_version: str | None,
    on_cpu: bool,
    restarted: bool = False,
    gpu_memory_bytes: int | None = None,
    kv_cache_bytes: int | None = None,
) -> LaunchCommand:
    """Returns the command that starts one server of a run.

    `model` is a local folder or a hub id; `directory` is for small files (the chat template). `restarted`: the server
    refuses to sample until it receives the current weights. `gpu_memory_bytes` is its GPU's memory, part of which stays
    free for a staging buffer. `kv_cache_bytes` is the KV cache size of a server that restarts on a shared GPU
    (`memory_arguments`). Raises `UserError` for an unsupported vLLM, and `ConfigError` when a required staging buffer
    leaves no memory for a sequence.
    """
    version = support.check_supported(vllm_version)
    model_config = read_config(model)
    shape = shape_of(model, model_config)
    arguments = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--host", address.host, "--port", str(address.port)]
    arguments += ["--model", model, "--served-model-name", config.model]
    arguments += ["--dtype", config.engine_dtype, "--seed", str(config.seed % 2**31)]
    if config.inference_quantization != "none":
        if on_cpu:
            raise ConfigError(f"inference_quantization is {config.inference_quantization}, which needs GPUs with FP8")
        arguments += ["--quantization", config.inference_quantization]
    if config.router_replay:
        support.check_routes(on_cpu=on_cpu, version=vllm_version)
        arguments.append("--enable-return-routed-experts")
    arguments += ["--max-model-len", str(config.max_model_len)]
    arguments += _batch_arguments(config, on_cpu=on_cpu)
    arguments += ["--scheduling-policy", config.vllm_scheduling_policy, "--enable-prefix-caching"]
    arguments += ["--tensor-parallel-size", str(config.inference_tensor_parallel_size)]
    if config.inference_tensor_parallel_size > 1:
        # Inside a Ray actor vLLM would choose Ray's executor, whose workers are not supervised here.
        arguments += ["--distributed-executor-backend", "mp"]
    # Logprobs of the sampled distribution, not of the raw model output.
    arguments += ["--logprobs-mode", "processed_logprobs"]
    arguments += ["--weight-transfer-config", json.dumps({"backend": "telescope"})]
    arguments += ["--worker-extension-cls", WORKER_EXTENSION, "--scheduler-cls", SCHEDULER]
    for middleware in MIDDLEWARES:
        arguments += ["--middleware", middleware]
    # A line per request would grow the log with the run.
    arguments += ["--disable-uvicorn-access-log", "--no-enable-log-requests"]
    # All requests of a failed engine share one exception, whose traceback grows each time it is raised. Logging stacks
    # (the default in development mode) would write the number of requests squared.
    arguments.append("--no-log-error-stack")
    eager = config.inference_enforce_eager
    if eager or (eager is None and on_cpu):
        arguments.append("--enforce-eager")
    staging = StagingPlan(0)
    if not on_cpu:
        if shape is not None and shape.num_experts:
            # vLLM's own choice on Hopper. Other backends keep experts in layouts that reload and probe do not support.
            arguments += ["--moe-backend", "triton"]
        staging = plan_staging(config, shape, gpu_memory_bytes)
        if staging.num_bytes and shape is not None:
            problem = estimate_memory(config, shape, device_memory_bytes=gpu_memory_bytes).kv_cache_problem
            if problem is not None:
                raise ConfigError(problem)
        arguments += memory_arguments(
            config, staging_bytes=staging.num_bytes, gpu_memory_bytes=gpu_memory_bytes, kv_cache_bytes=kv_cache_bytes
        )
    if config.lora_sync == "adapter":
        rank = min(served for served in SERVED_RANKS if served >= config.lora_rank)
        arguments += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
    if config.trust_remote_code:
        arguments.append("--trust-remote-code")
    if isinstance((model_config or {}).get("text_config"), dict):
        # Rollouts are text: the probe refuses towers for images and sound, since the trainer does not send them.
        arguments += ["--limit-mm-per-prompt", json.dumps(dict.fromkeys(("image", "video", "audio"), 0))]
    arguments += _chat_arguments(config, directory)
    if version >= SCALE_OUT_FLAG_SINCE:
        arguments.append("--enable-scale-out")
    environment = _environment(config, address.secret, shape, on_cpu=on_cpu, restarted=restarted)
    if config.router_replay and version >= support.ROUTES_BY_V2_SINCE:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    environment[TRANSFER_VARIABLE] = config.weight_transfer
    if staging.in_place_because is not None and config.weight_transfer == "auto":
        environment[TRANSFER_VARIABLE] = f"in_place: {staging.in_place_because}"
    step_limit = hang_timeout(config, on_cpu=on_cpu)
    environment[STEP_LIMIT_VARIABLE] = str(step_limit)
    environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(math.ceil(step_limit))  # the same limit for several workers
    environment[CALL_LIMIT_VARIABLE] = str(config.weight_sync_timeout_seconds)
    environment[STEP_METER_VARIABLE] = str(meter_path(directory, address.port))
    if address.traces is not None:
        arguments += ["--otlp-traces-endpoint", address.traces.url]
        environment |= trace_environment(address.traces, address.index)
    return LaunchCommand(arguments, environment)


def _batch_arguments(config: TelescopeConfig, *, on_cpu: bool) -> list[str]:
    """Returns the batch size flags. All request slots of a server fit, so that no request waits inside the engine.

    On the CPU a prompt is always prefilled whole: after part of a prompt, vLLM rewinds the random numbers of a seeded
    request (`Generator.set_offset`), which only GPU generators support, and the engine fails.
    """
    sequences = config.max_num_seqs or config.lanes_per_server
    arguments = ["--max-num-seqs", str(sequences)]
    tokens = config.max_num_batched_tokens
    if tokens is None and sequences > DEFAULT_BATCHED_TOKENS:
        tokens = sequences
    if on_cpu:
        arguments.append("--no-enable-chunked-prefill")
        tokens = max(tokens or DEFAULT_BATCHED_TOKENS, config.max_model_len)
    if tokens is not None:
        arguments += ["--max-num-batched-tokens", str(tokens)]
    return arguments


def _chat_arguments(config: TelescopeConfig, directory: Path) -> list[str]:
    """Returns template and parser flags of the OpenAI-compatible API. Rollouts send token ids and need none."""
    arguments: list[str] = []
    if config.chat_template is not None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "chat_template.jinja"
        path.write_text(config.chat_template, encoding="utf-8")
        arguments += ["--chat-template", str(path)]
    # Also when it is off: rollouts always render with the field, and templates such as those of Qwen3 think without it.
    arguments += ["--default-chat-template-kwargs", json.dumps({"enable_thinking": config.enable_thinking})]
    if config.vllm_tool_call_parser is not None:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", config.vllm_tool_call_parser]
    if config.vllm_reasoning_parser is not None:
        arguments += ["--reasoning-parser", config.vllm_reasoning_parser]
    return arguments


def _environment(
    config: TelescopeConfig, secret: str, shape: ModelShape | None, *, on_cpu: bool, restarted: bool
) -> dict[str, str]:
    environment = {
        SECRET_VARIABLE: secret,
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, weight updates and collective RPC
        "VLLM_ENABLE_SCALE_OUT_ENDPOINTS": "1",  # before 0.30; unknown and ignored since
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE_SECONDS),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "DEBUG" if config.debug else "INFO",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.inference_quantization != "none":
        # DeepGEMM would rearrange scales, and on some GPUs round them to powers of two: the probe could not read them.
        # It also compiles its kernels at the start, for which many machines have no compiler.
        environment["VLLM_USE_DEEP_GEMM"] = "0"
    if config.lora_sync == "adapter":
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if restarted:
        environment[REQUIRE_UPDATE_VARIABLE] = "1"
    if allowed := os.environ.get("VLLM_PLUGINS"):
        environment["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*allowed.split(","), "telescope"]))
    if on_cpu:
        threads = config.inference_threads or max(1, int(config.ray_inference_cpus_per_worker))
        environment |= {
            "OMP_NUM_THREADS": str(min(threads, num_cores())),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers may share the cores
            "VLLM_CPU_KVCACHE_SPACE": str(cpu_kv_cache_gib(config, shape, memory_bytes())),
        }
        if config.inference_tensor_parallel_size == 1:
            # Runs the worker in the engine's process, as on a GPU: a server starts in two thirds of the time. vLLM uses
            # a separate process on the CPU to bind OpenMP's threads for it, which "nobind" skips.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if config.inference_tensor_parallel_size > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        # The workers of a server are on one host; gloo would listen on the address of the host's name.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def shape_of(model: str, model_config: Mapping[str, Any] | None) -> ModelShape | None:
    """Returns the shape of a model with this `config.json`. None if it is not known."""
    return known_shape(model) if model_config is None else ModelShape.from_config(model_config)


LEAST_SHARE = 0.01
KV_CACHE_LINE = re.compile(r"Available KV cache memory: (\d+\.\d+) GiB")
ROUNDING_BYTES = GIB // 200
"""The log rounds to hundredths of a GiB, so up to this much of the size may not exist."""


def memory_arguments(
    config: TelescopeConfig, *, staging_bytes: int, gpu_memory_bytes: int | None, kv_cache_bytes: int | None
) -> list[str]:
    """Returns the memory flags of a server on a GPU.

    `staging_bytes` of `gpu_memory_bytes` stay free for its staging buffer. `kv_cache_bytes` is the size of the earlier
    KV cache, for a restart beside a trainer. None: vLLM measures.
    """
    # vLLM sizes its KV cache from the free memory under this bound; the staging buffer is allocated later.
    reserved = staging_bytes
    if kv_cache_bytes is not None:
        # The bound now only sets how much must be free. The context of this process is created before the check;
        # activations and CUDA graphs are allocated after it.
        reserved += CUDA_CONTEXT_BYTES + ENGINE_WORKSPACE_BYTES
    share = reserved / gpu_memory_bytes if gpu_memory_bytes else 0.0
    arguments = ["--gpu-memory-utilization", f"{max(config.gpu_memory_utilization - share, LEAST_SHARE):.4g}"]
    if kv_cache_bytes is not None:
        arguments += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
    return arguments


def kv_cache_of_a_restart(log: Iterable[str], estimate: EngineMemory | None) -> int | None:
    """Returns the KV cache size in bytes from vLLM's log, else the estimated one, else None: vLLM then measures."""
    found = [float(match[1]) for line in log if (match := KV_CACHE_LINE.search(line))]
    measured = int(found[-1] * GIB) - ROUNDING_BYTES if found else 0
    estimated = 0 if estimate is None else estimate.kv_cache
    return measured if measured > 0 else estimated or None
