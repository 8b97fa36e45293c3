"""The RL algorithm, filters on samples, the optimizer and the training backends."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from telescope.config.algorithms import AdvantageNorm, AlgorithmName
from telescope.config.base import MAX_STEPS, Count, Section, Text, Tokens, Workers, refuse
from telescope.config.lora import ALL_LINEAR


class AlgorithmSection(Section, title="Algorithm"):
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


class FilterSection(Section, title="Sample Filters"):
    """What to do with answers that are cut off, that repeat themselves, or that are not text. All off by default."""

    filter_overlong: bool = False
    """Leave answers that were cut off at max_tokens out of training."""
    overlong_penalty_factor: Annotated[float, Field(ge=0)] = 0.0
    """Largest amount subtracted from the reward of an answer that ends within overlong_buffer_tokens of max_tokens. 0 =
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


_NO_BACKEND = 'must be "fsdp", "megatron" or a class path such as "my_package.my_module:MyBackend"'


class TrainerSection(Section, title="Trainer"):
    learning_rate: Annotated[float, Field(gt=0, le=100)] = 1.0e-6
    """Learning rate (must be > 0). The peak of the schedule."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay coefficient of AdamW (decoupled: scaled by the learning rate)."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Maximum gradient norm for clipping, over all parameters and ranks. 0 = no clipping."""
    lr_scheduler: Literal["none", "constant", "linear", "cosine"] = "constant"
    """LR schedule. "none" = fixed LR; "constant" = warmup then constant; "linear" / "cosine" = warmup then decay
    over `number_of_steps`."""
    warmup_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Number of linear warmup steps. The first step already has a rate above 0. Ignored by "none"."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Minimum LR as a fraction of learning_rate for linear/cosine decay. Range: [0, 1]."""
    train_backend: Annotated[
        str,
        refuse(lambda value: not re.fullmatch(r"fsdp|megatron|[A-Za-z_][\w.]*:[A-Za-z_]\w*", value) and _NO_BACKEND),
    ] = "fsdp"
    """Training backend: "fsdp", "megatron" (`make setup MEGATRON=1`), or the path of your own subclass,
    "package.module:Class". FSDP suits models up to about 14B parameters; Megatron divides larger ones, and long rows,
    by layers, heads, experts and tokens."""
    compare_first_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 3
    """Training steps, from the start and after each resume, in which the engine's logprobs of tokens that both sides
    computed with equal weights are compared with the trainer's, by position. A difference beyond rounding stops the
    run. 0 = never. Not with top_p below 1 or lora_dropout."""
    router_replay: bool = False
    """Train each token of Qwen3-MoE with the experts that the engine chose for it (R3, arXiv 2510.11370). Without it,
    trainer and engine choose different experts where router logits nearly tie. Costs layers x experts per token bytes
    per token, and blocks are not compiled. `router_replay/agreement` is the share of equal choices."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass (FSDP); what attention returned is kept. Off: faster, and a multiple
    of the activation memory."""
    gradient_checkpointing_layers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """With `gradient_checkpointing`, the blocks that are recomputed, counted from the first (FSDP). null, or as many as
    the model has: all. Lower it as far as memory allows: a block that is not recomputed is up to a quarter faster, and
    keeps all its activations."""
    recompute_attention: bool | Literal["auto"] = "auto"
    """With `gradient_checkpointing`, recompute attention as well (FSDP). Saves about half of what is still kept, and
    costs up to a fifth of the speed at long `seq_len`. "auto": only on a GPU whose memory is too small otherwise."""
    compile_blocks: bool = True
    """Compile the model's blocks with torch.compile (FSDP, on GPU in half precision; elsewhere it does nothing). Takes
    about a minute, while the servers start. Turn it off for a model whose code does not compile."""
    fsdp_reshard_after_forward: bool | Literal["auto"] = "auto"
    """Whether a layer's gathered weights are dropped after its forward pass and gathered again for its backward pass
    (FSDP). false: weights are gathered once per optimizer step and kept until the update, which saves half of
    the gathers of one micro-batch and nearly all of many, and costs the memory of the whole model in
    mixed_precision_dtype; no result changes. "auto": true on GPUs, false on the CPU."""
    fsdp_prefetch_layers: Annotated[int, Field(ge=0, le=8)] = 1
    """Layers whose weights are gathered ahead of the one that computes, in both directions (FSDP). Each costs the
    memory of a gathered layer. Raise it when gathers are not hidden behind the computation (short micro-batches,
    several nodes); 0 leaves it to torch."""
    fsdp_context_parallel_size: Workers = 1
    """Neighboring ranks that share each row of `seq_len` tokens (context parallelism, FSDP). Raise it when a row does
    not fit one GPU: it divides activations by tokens, and attention by heads. Results do not change. Must divide
    trainer_num_workers and the attention heads; and the key and value heads, or be a multiple of them."""


class LoraSection(Section, title="LoRA"):
    """Train small adapters instead of all weights (FSDP).

    Fields and files are those of peft. docs/large-models.md has more.
    """

    lora_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of the adapters. 0 = off: all weights are trained. The base weights then stay frozen in `model_dtype`
    (bfloat16 is enough), and only the adapters, in float32, have gradients and optimizer state."""
    lora_alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """Numerator of the scale lora_alpha / lora_rank of an adapter's output."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of an adapter's input in training passes. Above 0 the trainer's logprobs differ from the engines'."""
    lora_target_modules: Text | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """Linear layers with an adapter: "all-linear" for all but the output layer, a list of names or their ends (q_proj),
    or a regular expression for whole names. Experts and embeddings can have none."""
    lora_sync: Literal["merged", "adapter"] = "merged"
    """What a weight sync sends. merged: all weights with the adapters added, as without LoRA; adapter: the adapters
    alone, through files in the run directory, which all servers must see. vLLM then adds them in every layer."""

    @field_validator("lora_target_modules", mode="before")
    @classmethod
    def _names_or_a_pattern(cls, value: Any) -> Any:
        names = value if isinstance(value, list | tuple) else [value]
        if not names or not all(isinstance(name, str) and name.strip() for name in names):
            raise ValueError(f'it must be "{ALL_LINEAR}", a regular expression, or a list of names: [q_proj, v_proj]')
        return value


OptimizerDtype = Literal["float32", "bfloat16", "float16", "fp8"]


class MegatronSection(Section, title="Megatron"):
    """Only relevant when `train_backend: "megatron"`; ignored with "fsdp"."""

    megatron_tensor_parallel_size: Workers = 1
    """Neighboring ranks that divide attention heads, MLPs and the vocabulary. Must divide the heads, the key and value
    heads, and the rows of an MLP."""
    megatron_pipeline_parallel_size: Workers = 1
    """Stages of consecutive layers. Must divide the layers."""
    megatron_context_parallel_size: Workers = 1
    """Ranks that share each row of `seq_len` tokens. Must divide the attention heads of a rank."""
    megatron_expert_parallel_size: Workers = 1
    """Ranks of a stage that divide the experts of a mixture of experts. Must divide them."""
    megatron_global_batch_size: Count | None = None
    """Global batch size, in groups of samples. null, or prompts_batch_size_for_trainer: it always trains the whole
    batch."""
    megatron_disable_unified_memory_jit: bool = True
    """Do not compile the allocator of unified memory, which only Megatron's own inference uses."""
    megatron_optimizer_cpu_offload: bool = False
    """Offload optimizer states to CPU. Frees GPU memory for larger models or batches, at the cost of step time."""
    megatron_optimizer_offload_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of optimizer state to offload. Range: [0, 1]."""
    megatron_overlap_cpu_optimizer_d2h_h2d: bool = True
    """Overlap CPU optimizer D2H/H2D transfers with compute."""
    megatron_use_precision_aware_optimizer: bool = False
    """Optimizer of Transformer Engine, which keeps its states in the four dtypes below. Needs Transformer Engine, see
    docs/gpu.md."""
    megatron_main_grads_dtype: OptimizerDtype = "float32"
    """Gradients that the optimizer reads: "float32" with megatron_grad_reduce_in_fp32, else "bfloat16"."""
    megatron_main_params_dtype: OptimizerDtype = "float32"
    """The optimizer's weights: "float32" or "float16"."""
    megatron_exp_avg_dtype: OptimizerDtype = "float32"
    """First moment of Adam: "float32", "bfloat16", "float16" or "fp8"."""
    megatron_exp_avg_sq_dtype: OptimizerDtype = "float32"
    """Second moment of Adam: "float32", "bfloat16", "float16" or "fp8"."""
    megatron_grad_reduce_in_fp32: bool = True
    """Sum gradients over ranks, and keep them, in float32. false halves their memory."""
    megatron_gradient_checkpointing: bool = True
    """Recompute the activations of every layer in the backward pass."""
    megatron_sequence_parallel: bool = True
    """Shard sequence dimension in LayerNorm/dropout (requires TP > 1)."""
    megatron_use_distributed_optimizer: bool = True
    """Shard optimizer states across DP ranks (requires DP > 1)."""
    megatron_overlap_grad_reduce: bool = False
    """Overlap gradient allreduce with backward compute."""
    megatron_use_transformer_engine: bool = False
    """Compute layers with Transformer Engine: norms fused with the products after them, experts in one product.
    Needs Transformer Engine, see docs/gpu.md."""
    megatron_fp8: bool = False
    """Compute the products of layers in FP8, scaled by blocks. Requires megatron_use_transformer_engine, and GPUs of
    the Hopper generation or newer."""
