"""How a vLLM process is started: command, environment, and what its failures to start mean.

Owns every flag and environment variable that Telescope gives to vLLM, per supported version. Pure but for reading the
model's `config.json`; `server` runs the result. The run's secret travels in the environment only.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from telescope.config import TelescopeConfig
from telescope.config.memory import StagingPlan, estimate_memory, plan_staging
from telescope.config.model_shape import ModelShape, known_shape
from telescope.errors import ConfigError
from telescope.inference.auth import SECRET_VARIABLE
from telescope.inference.vllm.engine_health import CALL_LIMIT_VARIABLE, STEP_LIMIT_VARIABLE
from telescope.inference.vllm.gpu_share import memory_arguments
from telescope.inference.vllm.plugin import TRANSFER_VARIABLE
from telescope.inference.vllm.policy_version import REQUIRE_UPDATE_VARIABLE
from telescope.inference.vllm.request_tracing import TraceTarget
from telescope.inference.vllm.step_meter import STEP_METER_VARIABLE, meter_path
from telescope.inference.vllm.support import check_supported, is_cpu_build

SCALE_OUT_FLAG_SINCE = (0, 30)
"""`--enable-scale-out` opens the token-in-token-out route since 0.30; an environment variable did before."""

MIDDLEWARES = (
    "telescope.inference.vllm.policy_version.PolicyVersionMiddleware",
    "telescope.inference.vllm.binary_responses.BinaryResponseMiddleware",
    "telescope.inference.vllm.step_meter.StepMetricsMiddleware",
    "telescope.inference.vllm.engine_health.EngineHangMiddleware",
    "telescope.inference.vllm.engine_health.EngineDeathMiddleware",
    "telescope.inference.auth.RunSecretMiddleware",
)
"""In vLLM's order: the last one is outermost, so nothing is seen without the secret."""

WORKER_EXTENSION = "telescope.inference.vllm.weights.WeightsWorkerExtension"
SCHEDULER = "telescope.inference.vllm.scheduler.make_scheduler"
DEFAULT_BATCHED_TOKENS = 2048
"""vLLM's smallest default of max_num_batched_tokens; with more sequences than that it must be set."""

SERVER_KEEP_ALIVE_SECONDS = 600
"""vLLM closes idle connections after 5 s by default, just when a driver may be using one again."""

HANG_TIMEOUT_SECONDS = {"cuda": 300.0, "cpu": 600.0}
"""`inference_hang_timeout_seconds` by default. On GPUs what vLLM gives a step of several workers; on CPUs a prompt is
prefilled whole: 8,192 tokens of a 1.5B model take some 300 s at 80 GFLOP/s."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
GIB = 2**30


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """A process to start: its arguments, and what is added to the environment."""

    arguments: list[str]
    environment: dict[str, str]


def runs_on_cpu(config: TelescopeConfig) -> bool:
    """Whether the engine computes on the CPU: `device` decides, else which build of vLLM is installed."""
    if config.device != "auto":
        return config.device == "cpu"
    return is_cpu_build()


def hang_timeout(config: TelescopeConfig, *, on_cpu: bool) -> float:
    """Seconds after which an engine that gives no sign of life is restarted."""
    return config.inference_hang_timeout_seconds or HANG_TIMEOUT_SECONDS["cpu" if on_cpu else "cuda"]


def launch_command(
    config: TelescopeConfig,
    *,
    host: str,
    port: int,
    secret: str,
    model: str,
    directory: Path,
    vllm_version: str,
    on_cpu: bool,
    restarted: bool = False,
    gpu_memory_bytes: int | None = None,
    kv_cache_bytes: int | None = None,
    traces: TraceTarget | None = None,
    index: int = 0,
) -> LaunchCommand:
    """What starts one server of a run.

    `model` is a local folder or a hub id; `directory` takes small files (the chat template). `restarted` makes the
    server refuse to sample until it has been given the current weights. `gpu_memory_bytes` is its GPU's, of which the
    second copy of the weights is kept free where they come in the background. `kv_cache_bytes` is the KV cache of a
    server that starts again on a GPU that it shares (`gpu_share`). `traces` is where it sends the traces of
    its requests, as server `index`. Raises `UserError` for an unsupported vLLM, `ConfigError` when a second copy that
    the config insists on leaves no room for a sequence.
    """
    version = check_supported(vllm_version)
    arguments = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--host", host, "--port", str(port), "--model", model, "--served-model-name", config.model]
    arguments += ["--dtype", config.engine_dtype, "--seed", str(config.seed % 2**31)]
    arguments += ["--max-model-len", str(config.max_model_len)]
    arguments += _batch_arguments(config, on_cpu=on_cpu)
    arguments += ["--scheduling-policy", config.vllm_scheduling_policy, "--enable-prefix-caching"]
    arguments += ["--tensor-parallel-size", str(config.inference_tensor_parallel_size)]
    if config.inference_tensor_parallel_size > 1:
        # Inside a Ray actor vLLM would take Ray's own executor, whose workers nobody here supervises.
        arguments += ["--distributed-executor-backend", "mp"]
    # Logprobs of the distribution that was sampled from, not of the raw model output.
    arguments += ["--logprobs-mode", "processed_logprobs"]
    arguments += ["--weight-transfer-config", json.dumps({"backend": "telescope"})]
    arguments += ["--worker-extension-cls", WORKER_EXTENSION, "--scheduler-cls", SCHEDULER]
    for middleware in MIDDLEWARES:
        arguments += ["--middleware", middleware]
    # A line per request would make the log grow with the run.
    arguments += ["--disable-uvicorn-access-log", "--no-enable-log-requests"]
    # All requests of an engine that dies are given one exception, whose traceback grows with each that raises it. With
    # their stacks logged (the default in development mode) that would be thousands of requests squared.
    arguments.append("--no-log-error-stack")
    eager = config.inference_enforce_eager
    if eager or (eager is None and on_cpu):
        arguments.append("--enforce-eager")
    shadows = StagingPlan(0)
    if not on_cpu:
        shape = shape_of(model)
        if shape is not None and shape.num_experts:
            # vLLM's own choice on Hopper. Others keep experts in layouts that a reload or the probe does not know.
            arguments += ["--moe-backend", "triton"]
        shadows = plan_staging(config, shape, gpu_memory_bytes)
        if shadows.num_bytes and shape is not None:
            problem = estimate_memory(config, shape, device_memory_bytes=gpu_memory_bytes).kv_cache_problem
            if problem is not None:
                raise ConfigError(problem)
        arguments += memory_arguments(
            config,
            shadow_bytes=shadows.num_bytes,
            gpu_memory_bytes=gpu_memory_bytes,
            kv_cache_bytes=kv_cache_bytes,
        )
    if config.trust_remote_code:
        arguments.append("--trust-remote-code")
    arguments += _chat_arguments(config, directory)
    if version >= SCALE_OUT_FLAG_SINCE:
        arguments.append("--enable-scale-out")
    environment = _environment(config, secret, model, on_cpu=on_cpu, restarted=restarted)
    environment[TRANSFER_VARIABLE] = config.weight_transfer
    if shadows.in_place_because is not None and config.weight_transfer == "auto":
        environment[TRANSFER_VARIABLE] = f"in_place: {shadows.in_place_because}"
    step_limit = hang_timeout(config, on_cpu=on_cpu)
    environment[STEP_LIMIT_VARIABLE] = str(step_limit)
    environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(math.ceil(step_limit))  # the same, of several workers
    environment[CALL_LIMIT_VARIABLE] = str(config.weight_sync_timeout_seconds)
    environment[STEP_METER_VARIABLE] = str(meter_path(directory, port))
    if traces is not None:
        arguments += ["--otlp-traces-endpoint", traces.url]
        environment |= traces.environment(index)
    return LaunchCommand(arguments, environment)


def _batch_arguments(config: TelescopeConfig, *, on_cpu: bool) -> list[str]:
    """How many sequences run at once: all lanes of a server, so that a lane never waits inside the engine.

    On the CPU a prompt is always prefilled whole: after a part of a prompt, vLLM takes back the random numbers of a
    request that has a seed (`Generator.set_offset`), which only GPU generators can do, and the engine dies of it.
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
    """Template and parsers of the OpenAI-compatible API; rollouts send token ids and need none of them."""
    arguments: list[str] = []
    if config.chat_template is not None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "chat_template.jinja"
        path.write_text(config.chat_template, encoding="utf-8")
        arguments += ["--chat-template", str(path)]
    if config.enable_thinking:
        arguments += ["--default-chat-template-kwargs", json.dumps({"enable_thinking": True})]
    if config.vllm_tool_call_parser is not None:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", config.vllm_tool_call_parser]
    if config.vllm_reasoning_parser is not None:
        arguments += ["--reasoning-parser", config.vllm_reasoning_parser]
    return arguments


def _environment(config: TelescopeConfig, secret: str, model: str, *, on_cpu: bool, restarted: bool) -> dict[str, str]:
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
    if restarted:
        environment[REQUIRE_UPDATE_VARIABLE] = "1"
    if allowed := os.environ.get("VLLM_PLUGINS"):
        environment["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*allowed.split(","), "telescope"]))
    if on_cpu:
        threads = config.inference_threads or max(1, int(config.ray_inference_cpus_per_worker))
        environment |= {
            "OMP_NUM_THREADS": str(min(threads, os.cpu_count() or threads)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers may share the cores
            # Of each worker, which holds its share of the heads.
            "VLLM_CPU_KVCACHE_SPACE": str(
                math.ceil(kv_cache_gib(config, read_model_shape(model)) / config.inference_tensor_parallel_size)
            ),
        }
    if config.inference_tensor_parallel_size > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        # The workers of a server are on one host; gloo would listen on whatever the host's name resolves to.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def shape_of(model: str) -> ModelShape | None:
    """The model's shape, as far as it can be known without asking the hub."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return known_shape(model)
    return ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")))


# --- KV cache on the CPU --------------------------------------------------------------------------------------------


def read_model_shape(model: str) -> Mapping[str, int] | None:
    """The model's `config.json`, or None when `model` is a hub id that is not on this machine."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    text = content.get("text_config", content)  # multi-modal models nest the language model
    return {name: value for name, value in text.items() if isinstance(value, int)}


def kv_cache_gib(config: TelescopeConfig, shape: Mapping[str, int] | None, memory_bytes: int | None = None) -> float:
    """GiB of KV cache of a server on the CPU: what was asked for, else enough for all lanes at full length.

    At most a quarter of the machine's memory; vLLM takes whole GiB, so the caller rounds up.
    """
    if config.inference_kv_cache_gib is not None:
        return config.inference_kv_cache_gib
    if memory_bytes is None:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ceiling = memory_bytes / 4 / GIB
    if shape is None or "num_hidden_layers" not in shape or "num_attention_heads" not in shape:
        return min(4.0, ceiling)
    heads = shape.get("num_key_value_heads", shape["num_attention_heads"])
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    per_token = 2 * shape["num_hidden_layers"] * heads * head_dim * DTYPE_BYTES[config.engine_dtype]
    sequences = config.max_num_seqs or config.lanes_per_server
    return min(per_token * config.max_model_len * sequences / GIB, ceiling)


# --- failures -------------------------------------------------------------------------------------------------------

HINTS = (
    (r"[Aa]ddress already in use", "the port is in use: change inference_base_port"),
    (
        r"No available memory for the cache blocks|KV cache is needed, which is larger|max seq len .* is larger than",
        "the KV cache does not hold one sequence: lower max_model_len, or raise gpu_memory_utilization (on the CPU: "
        "inference_kv_cache_gib)",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|less than desired GPU memory utilization",
        "the GPU is full: lower gpu_memory_utilization or max_num_seqs, or end other processes on it",
    ),
    (r"weight_transfer is background, but", "set weight_transfer to auto or in_place"),
    (
        r"`trust_remote_code=True`|`--trust-remote-code`",
        "the model ships its own code: read it, then set trust_remote_code: true",
    ),
    (r"User-specified max_model_len", "the model is not made for that length: lower max_model_len"),
    (
        r"Repository Not Found|is not a valid model identifier|not a local folder|LocalEntryNotFoundError|OfflineMode|"
        r"Repo id must be",
        "the model cannot be found: check `model` (a folder, or a hub id that is cached or reachable)",
    ),
    (r"[Ii]nvalid tool call parser", "vllm_tool_call_parser is none that this vLLM knows"),
    (r"[Ii]nvalid reasoning parser", "vllm_reasoning_parser is none that this vLLM knows"),
    (r"Bfloat16 is only supported|float16 is not supported|dtype .* is not supported", "set inference_dtype: float32"),
    (r"unrecognized arguments", "this vLLM does not know a flag that Telescope uses: install the pinned version"),
    (r"No module named 'telescope", "vLLM's Python cannot import telescope: install it into the same environment"),
)


def hint_for(log: str) -> str | None:
    """The fix for a failure to start that its log shows, or None when nobody has met it yet."""
    for pattern, hint in HINTS:
        if re.search(pattern, log):
            return hint
    return None
