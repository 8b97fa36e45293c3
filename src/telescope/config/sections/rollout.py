"""Inference servers, tracing, the orchestrator's loops, sampling and packing."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from telescope.config.base import MAX_STEPS, Count, Dtype, Seconds, Section, Steps, Text, Tokens

Port = Annotated[int, Field(ge=1, le=65535)]


def _read_template(text: str) -> str:
    """Returns the template in the file that `text` names, or `text` if it is a template itself."""
    if _is_template(text):
        return text
    try:
        template = Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"it has no {{{{ or {{% and is read as a file, which cannot be read ({problem}). Set a template, or the "
            "path of a file with one"
        ) from None
    if not _is_template(template):
        raise ValueError("that file has no {{ or {%. Set a Jinja2 template, or the path of a file with one")
    return template


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


class InferenceSection(Section, title="Inference Server"):
    inference_host: Text = "0.0.0.0"
    """Host address for inference servers. Unless you set another one, or this one by a flag, a run on a single node
    binds to the loopback address only."""
    inference_base_port: Port = 8100
    """Base port for inference servers. Server i listens on this plus i. Change it when the port is in use."""
    inference_dtype: Dtype | None = None
    """Dtype that the engine computes in, and that weights are sent in. Null: mixed_precision_dtype, else
    model_dtype."""
    inference_quantization: Literal["none", "fp8_per_block"] = "none"
    """Quantization of the servers' weights. "fp8_per_block": matrices of linear layers and experts become FP8 with a
    scale per 128 x 128 block when they arrive, and activations while they are computed; half the memory, on GPUs with
    FP8 only. The trainer keeps its own precision, so logprobs differ (`kl_divergence_inference`): set `use_tis`."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of GPU memory allocated to vLLM. Range: (0, 1]. What weights leave of it becomes KV cache. Lower it
    when other processes use the GPU."""
    inference_kv_cache_gib: Annotated[float, Field(gt=0, le=65_536)] | None = None
    """KV cache of each server on the CPU, in GiB, shared by its workers and rounded up to a whole number for each.
    Null: enough for all request slots of a server at full length, at most a quarter of the memory. No effect on
    GPUs."""
    max_model_len: Tokens = 4096
    """Maximum context length for vLLM, in tokens: prompt and answer together."""
    max_num_seqs: Count | None = None
    """Sequences that the engine runs at once. Null: the request slots of one server."""
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
    chat_template: Annotated[Text, AfterValidator(_read_template)] | None = None
    """Jinja2 chat template, or the path of a file with one, in place of the tokenizer's. Required for base models whose
    tokenizer has none. A path is relative to the working directory. The file is read once: `config.yaml` of the run
    has its content."""
    vllm_tool_call_parser: Text | None = None
    """vLLM's tool-call parser of the OpenAI-compatible API, such as `hermes`. Null: none. Rollouts do not go through
    it: `ToolEnvironment` reads the calls."""
    vllm_reasoning_parser: Text | None = None
    """vLLM's reasoning parser of the OpenAI-compatible API, such as `qwen3`. Null: none. Rollouts do not go through
    it."""
    inference_start_timeout_seconds: Seconds = 900.0
    """Seconds that a server may take from launch until it answers. Raise it for large models on slow disks."""
    inference_hang_timeout_seconds: Seconds | None = None
    """Seconds after which a server is restarted whose engine process does not respond. It responds between two steps.
    Null: 300 on GPUs and 600 on CPUs, where a step with a long prompt takes long. A weight sync may
    take weight_sync_timeout_seconds all the same. Replaces vLLM's VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS."""


class TracingSection(Section, title="vLLM Tracing"):
    enable_vllm_tracing: bool = True
    """Enable OpenTelemetry tracing for vLLM: queue, first token, prefill and decode times of each request."""
    otlp_receiver_port: Port = 4318
    """OTLP HTTP receiver port. Range: [1, 65535]. When it is in use, another one is used instead."""


class OrchestratorSection(Section, title="Orchestrator"):
    max_concurrent_prompts_per_server: Count = 32
    """Max concurrent prompts per inference server. A server's request slots are this times `group_size`. Raise it when
    the engine has KV cache to spare, lower it when requests are preempted."""
    prompts_batch_size_for_trainer: Count = 16
    """Number of prompt groups per training batch. A batch trains this times `group_size` samples."""
    number_of_steps: Steps = 300
    """Total training steps."""
    max_async_rollout: Annotated[int, Field(ge=0, le=1000)] = 2
    """How many training steps inference can run ahead. 0 = fully synchronous: reproducible, and slower. Higher
    keeps both sides busy and trains on older samples."""
    discard_group_zero_advantage: bool = True
    """Drop groups where all samples got identical rewards (no learning signal). A dropped group is replaced at once."""
    enable_prompt_prefetch: bool = True
    """Prefetch prompts from the dataset, rendered and tokenized before they are needed. Off: one at a time."""
    prompt_prefetch_buffer_size: Count = 24
    """Number of prompts to prefetch. Raise it when preparing a prompt is slow."""
    enable_individual_sample_lanes: bool = True
    """Each sample gets its own request slot instead of one per group. Off: a group keeps all its slots until its last
    sample ends."""
    free_lane_after_generation: bool = True
    """Free the request slot after generation completes (before reward computation). Improves throughput when reward
    computation is slow (e.g., sandbox environments). Requires enable_individual_sample_lanes."""
    max_off_policy_steps: Annotated[int, Field(ge=-1, le=MAX_STEPS)] = 8
    """Cancel in-flight rollouts after this many weight updates: a group whose oldest token is older is dropped, and
    its prompt is requeued, up to twice. So no older token is trained. Below `max_async_rollout` it discards up to
    half of what is generated. -1 turns cancellation off."""
    inflight_kv: Literal["keep", "recompute"] = "keep"
    """What a weight update does to the KV cache of answers that are being generated. `keep` goes on with it (no
    pause for recomputing); `recompute` drops it, so that every later token is sampled by the new weights alone."""
    request_timeout_seconds: Seconds = 1800.0
    """Seconds that one generation may take before it counts as an infrastructure failure and is retried."""


class SamplingSection(Section, title="Rollout / Sampling"):
    group_size: Count = 8
    """Number of completions sampled per prompt. Larger groups estimate the baseline better and cost more generation."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Sampling temperature, up to 2, which is where vLLM stops. Trainer and engine both apply it, so that logprobs mean
    the same on both sides."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling probability, in (0, 1]. null = disabled. Below 1 the engine's logprobs are those of the cut
    distribution and the trainer's are not."""
    max_tokens: Tokens = 3700
    """Maximum generation tokens per completion (per turn in multi-turn environments). At most
    `max_model_len`, which holds the prompt too."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """Token ids that end an answer, besides the end tokens that tokenizer, generation_config.json and config.json name.
    Null: those that the chat template writes behind an answer, such as `<|im_end|>`. The end token is trained and is no
    part of the text that is scored."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that end an answer, such as "\\nUser:". Its tokens are trained, and the text is not scored."""
    allow_special_tokens_in_content: bool = False
    """Whether the name of a special token in the content of a message, such as `<|im_end|>` in a tool's result, becomes
    that token. By default it stays text, so that content cannot begin or end a turn."""
    interleaved_rollouts: bool = True
    """Exact token reuse across turns — avoids re-tokenization mismatches in multi-turn environments. Off: the
    conversation is rendered anew each turn and each turn is its own training sample. Choose that for a chat template
    that removes the reasoning of earlier answers, if the model should not read it."""


class PackingSection(Section, title="Sequence Packing"):
    seq_len: Tokens = 4096
    """Maximum sequence length for packing, in tokens: the size of one micro-batch of one rank. At least the
    longest trajectory (prompt and answer). Lower it when the trainer runs out of memory."""
    overlong_samples: Literal["error", "truncate"] = "error"
    """Treatment of samples longer than `seq_len`. "error": none arises, because generation stops there; one that
    does ends the run. "truncate": generation goes on to `max_model_len`, and what lies beyond `seq_len` is not trained
    on and counted in `packing/truncated_samples` and `packing/truncated_tokens`."""
    pad_to_multiple_of: Tokens = 64
    """Pad packed sequences to this alignment, in tokens. Padding is never trained on."""
