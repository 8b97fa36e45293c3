"""The RL algorithm, its corrections and penalties, and the filters on samples."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from telescope.config.algorithms import AdvantageNorm, AlgorithmName
from telescope.config.base import Count, Section, Tokens


class AlgorithmSection(Section):
    TITLE: ClassVar[str] = "Algorithm"

    algorithm: AlgorithmName = "grpo"
    """RL algorithm. Each is described in docs/algorithms.md."""
    number_of_minibatches: Count = 1
    """PPO-style gradient steps per rollout batch. >1 enables multiple update passes. Groups stay whole, so at most
    prompts_batch_size_for_trainer."""
    advantage_norm: AdvantageNorm = "group"
    """Normalize advantages within each prompt group or across the training batch. reinforce_pp requires "batch";
    rloo and dr_grpo require "group"."""
    use_ppo_clip: bool = False
    """Apply PPO ratio clipping. Incompatible with cispo, gspo, sapo."""
    ppo_clip_ref_logprobs: Literal["rollout", "batch"] = "rollout"
    """Reference logprobs for PPO clipping. "rollout" = vLLM logprobs; "batch" = recompute with trainer. Also the
    reference of cispo, gspo and sapo."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.4
    """PPO clip lower bound: ratio is clamped to 1 - clip_low. Range: [0, 1]. GSPO wants values of order 1e-4."""
    clip_high: Annotated[float, Field(ge=0)] = 0.5
    """PPO clip upper bound: ratio is clamped to 1 + clip_high. GSPO wants values of order 1e-4."""
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: bound of the ratio for negative advantages, above 1. null = off. Requires use_ppo_clip."""
    sapo_tau_pos: Annotated[float, Field(gt=0)] = 1.0
    """SAPO sigmoid sharpness for positive advantages."""
    sapo_tau_neg: Annotated[float, Field(gt=0)] = 1.05
    """SAPO sigmoid sharpness for negative advantages."""
    dr_grpo_loss_agg_mode: Literal["token_mean", "token_sum_norm"] = "token_mean"
    """DR-GRPO loss aggregation. "token_sum_norm" removes response-level length bias."""
    use_tis: bool = False
    """Truncated importance sampling for async vLLM/trainer logprob correction. Refused where the loss already holds
    that ratio."""
    tis_mode: Literal["truncate", "icepop"] = "truncate"
    """What TIS does with a weight out of bounds. "truncate" caps it; "icepop" masks the token."""
    tis_cap: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    """Max importance weight for TIS."""
    tis_floor: Annotated[float, Field(ge=0)] | None = None
    """Min importance weight for TIS. null = no lower bound. Below tis_cap."""
    tis_logprob_clamp: Annotated[float, Field(gt=0)] = 20.0
    """Logprob clamping threshold for TIS: the difference of logprobs is clamped to plus or minus this, in nats."""
    kl_penalty_tau: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a KL penalty to the rollout policy. 0 = off."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """Estimator of that KL penalty."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus in the loss. 0 = off; positive keeps answers diverse."""
    entropy_chunk_size: Tokens = 1024
    """Chunk size for entropy calculation, in tokens. Logprobs and entropy are computed this many tokens at a time;
    memory is this times the vocabulary times a few floats (on Hopper GPUs times the two bytes of a gradient, in the
    backward pass alone). Lower it when the output layer runs out of memory."""
    seq_is_masking: bool = False
    """Mask a whole sample when the geometric mean of its importance ratios leaves [seq_is_mask_low,
    seq_is_mask_high]."""
    seq_is_mask_low: Annotated[float, Field(ge=0)] = 0.8
    """Lower bound of that mean."""
    seq_is_mask_high: Annotated[float, Field(gt=0)] = 1.2
    """Upper bound of that mean."""


class FilterSection(Section):
    TITLE: ClassVar[str] = "Sample Filters"
    INTRO: ClassVar[str] = (
        "What to do with answers that are cut off, that repeat themselves, or that are not text. All off by default."
    )

    filter_overlong: bool = False
    """Leave answers that were cut off at max_tokens out of training."""
    overlong_penalty_factor: Annotated[float, Field(ge=0)] = 0.0
    """Largest amount taken off the reward of an answer that ends within overlong_buffer_tokens of max_tokens. 0 =
    off."""
    overlong_buffer_tokens: Tokens = 256
    """Tokens before max_tokens over which that penalty grows from 0 to its full amount."""
    filter_repetition: bool = False
    """Leave answers that repeat themselves out of training."""
    repetition_compression_threshold: Annotated[float, Field(gt=1)] = 10.0
    """Compression ratio of its text above which an answer counts as repetitive."""
    filter_gibberish: bool = False
    """Leave answers with gibberish tokens out of training: rare tokens that were sampled at a very low probability."""
    gibberish_token_threshold: Annotated[int, Field(ge=0, le=2**31)] = 100_000
    """Token id above which a token counts as rare."""
    gibberish_logprob_offset: float = 2.0
    """How far below the logprob of a uniform choice over the vocabulary a rare token must lie to count, in nats."""
