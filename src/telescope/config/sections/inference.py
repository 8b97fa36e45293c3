"""The vLLM servers and their tracing."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from telescope.config.base import Count, Dtype, Seconds, Section, Text, Tokens

Port = Annotated[int, Field(ge=1, le=65535)]


class InferenceSection(Section):
    TITLE: ClassVar[str] = "Inference Server"

    inference_host: Text = "0.0.0.0"
    """Host address for inference servers. As long as you do not set it, a run on a single node binds to the
    loopback address only."""
    inference_base_port: Port = 8100
    """Base port for inference servers. Server i listens on this plus i. Change it when the port is in use."""
    inference_dtype: Dtype | None = None
    """Dtype that the engine computes in, and that weights are sent in. Null: mixed_precision_dtype, else
    model_dtype."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of GPU memory allocated to vLLM. Range: (0, 1]. What weights leave of it becomes KV cache. Lower it
    when other processes use the GPU."""
    inference_kv_cache_gib: Annotated[float, Field(gt=0, le=65_536)] | None = None
    """KV cache of each server on the CPU, in GiB, shared by its workers and rounded up to a whole number for each.
    Null: enough for all lanes of a server at full length, at most a quarter of the memory. No effect on GPUs."""
    max_model_len: Tokens = 4096
    """Maximum context length for vLLM, in tokens: prompt and answer together."""
    max_num_seqs: Count | None = None
    """Sequences that the engine runs at once. Null: the lanes of one server."""
    max_num_batched_tokens: Tokens | None = None
    """Tokens that the engine processes in one iteration. Null: vLLM's own choice."""
    vllm_scheduling_policy: Literal["priority", "fcfs"] = "priority"
    """Order in which requests are served. "priority" = turn-aware scheduling for multi-turn; "fcfs" =
    first-come-first-served."""
    inference_enforce_eager: bool | None = None
    """Run the engine without compilation and CUDA graphs. Null: eager on the CPU, graphs on GPUs. True starts
    faster and generates slower."""
    enable_thinking: bool = False
    """Pass enable_thinking=True to apply_chat_template() for models with native thinking support."""
    chat_template: Text | None = None
    """Jinja2 chat template string to override the tokenizer's built-in template. Required for base models that
    don't include a chat template in their tokenizer."""
    vllm_tool_call_parser: Text | None = None
    """vLLM's tool-call parser of the OpenAI-compatible API, such as `hermes`. Null: none. Rollouts do not go through
    it: `ToolEnvironment` reads the calls."""
    vllm_reasoning_parser: Text | None = None
    """vLLM's reasoning parser of the OpenAI-compatible API, such as `qwen3`. Null: none. Rollouts do not go through
    it."""
    inference_start_timeout_seconds: Seconds = 900.0
    """Seconds that a server may take from launch until it answers. Raise it for large models on slow disks."""
    inference_hang_timeout_seconds: Seconds | None = None
    """Seconds for which the process of an engine may give no sign of life before its server is restarted. It gives one
    between two steps. Null: 300 on GPUs and 600 on CPUs, where a step with a long prompt takes long. A weight sync may
    take weight_sync_timeout_seconds all the same. Replaces vLLM's VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS."""


class TracingSection(Section):
    TITLE: ClassVar[str] = "vLLM Tracing"

    enable_vllm_tracing: bool = True
    """Enable OpenTelemetry tracing for vLLM: queue, first token, prefill and decode times of each request."""
    otlp_receiver_port: Port = 4318
    """OTLP HTTP receiver port. Range: [1, 65535]. When it is taken, a free one is used instead."""
