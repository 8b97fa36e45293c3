"""The orchestrator's loops, sampling and sequence packing."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from telescope.config.base import MAX_STEPS, Count, Seconds, Section, Steps, Tokens


class OrchestratorSection(Section):
    TITLE: ClassVar[str] = "Orchestrator"

    max_concurrent_prompts_per_server: Count = 32
    """Max concurrent prompts per inference server. A server's lanes are this times `group_size`. Raise it when the
    engine has KV cache to spare, lower it when requests are preempted."""
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
    """Prefetch prompts from the dataset, rendered and tokenised before they are needed. Off: one at a time."""
    prompt_prefetch_buffer_size: Count = 24
    """Number of prompts to prefetch. Raise it when preparing a prompt is slow."""
    enable_individual_sample_lanes: bool = True
    """Each sample gets its own lane slot instead of one per group. Off: a group holds all its lanes until its last
    sample ends."""
    free_lane_after_generation: bool = True
    """Free inference lane after generation completes (before reward computation). Improves throughput when reward
    computation is slow (e.g., sandbox environments). Requires enable_individual_sample_lanes."""
    max_off_policy_steps: Annotated[int, Field(ge=-1, le=MAX_STEPS)] = 8
    """Cancel in-flight rollouts after this many weight updates: a group whose oldest token is older is given up, and
    its prompt is asked again, up to twice. So no older token is trained. Below `max_async_rollout` it throws away
    up to half of what is generated. -1 turns cancellation off."""
    inflight_kv: Literal["keep", "recompute"] = "keep"
    """What a weight update does to the KV cache of answers that are being generated. `keep` goes on with it (no
    pause for recomputing); `recompute` drops it, so that every later token is sampled by the new weights alone."""
    request_timeout_seconds: Seconds = 1800.0
    """Seconds that one generation may take before it counts as an infrastructure failure and is issued again."""


class SamplingSection(Section):
    TITLE: ClassVar[str] = "Rollout / Sampling"

    group_size: Count = 8
    """Number of completions sampled per prompt. Larger groups estimate the baseline better and cost more generation."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Sampling temperature, up to 2, which is where vLLM stops. Trainer and engine both apply it, so that logprobs mean
    the same on both sides."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling probability, in (0, 1]. null = disabled. Below 1 the engine's logprobs are those of the cut
    distribution and the trainer's are not."""
    max_tokens: Tokens = 3700
    """Maximum generation tokens per completion (per turn in multi-turn environments). Below
    `max_model_len`, which holds the prompt too."""
    interleaved_rollouts: bool = True
    """Exact token reuse across turns — avoids re-tokenization mismatches in multi-turn environments. Off: the
    conversation is rendered anew each turn and each turn is its own training sample."""


class PackingSection(Section):
    TITLE: ClassVar[str] = "Sequence Packing"

    seq_len: Tokens = 4096
    """Maximum sequence length for packing, in tokens: how much one micro-batch of one rank holds. At least the
    longest trajectory (prompt and answer). Lower it when the trainer runs out of memory."""
    overlong_samples: Literal["error", "truncate"] = "error"
    """What becomes of samples longer than `seq_len`. "error": none arises, because generation stops there; one that
    does ends the run. "truncate": generation goes on to `max_model_len`, and what lies beyond `seq_len` is not trained
    on and counted in `packing/truncated_samples` and `packing/truncated_tokens`."""
    pad_to_multiple_of: Tokens = 64
    """Pad packed sequences to this alignment, in tokens. Padding is never trained on."""
