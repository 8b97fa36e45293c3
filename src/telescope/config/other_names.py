"""Names of settings in TRL, verl and other frameworks, and what stands for them here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from telescope.utils.text import did_you_mean

FIELDS = {
    "algorithm": "loss_type adv_estimator advantage_estimator",
    "checkpoint_every": "save_steps save_freq save_interval",
    "checkpoint_keep_last": "save_total_limit max_actor_ckpt_to_keep",
    "clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "clip_low": "epsilon_low clip_ratio_low eps_clip_low",
    "clip_ratio_c": "delta",
    "entropy_coef": "entropy_coeff",
    "environments": "env envs",
    "filter_overlong": "mask_truncated_completions overlong_filtering",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "grad_clip": "max_grad_norm max_norm clip_grad",
    "group_size": "num_generations rollout.n n_samples_per_prompt num_return_sequences rollouts_per_example",
    "inference_tensor_parallel_size": "tp tensor_model_parallel_size vllm_tensor_parallel_size",
    "learning_rate": "lr actor_learning_rate",
    "lora_rank": "lora_r peft_config",
    "lora_target_modules": "target_modules",
    "lr_scheduler": "scheduler lr_scheduler_type",
    "max_async_rollout": "max_async_level max_head_offpolicyness staleness_threshold",
    "max_model_len": "vllm_max_model_length max_seq_length",
    "max_tokens": "max_new_tokens max_completion_length max_response_length response_length generate_max_len",
    "mixed_precision_dtype": "bf16 fp16 torch_dtype",
    "model": "model_name model_name_or_path model.path base_model pretrain",
    "number_of_steps": "steps max_steps num_steps total_training_steps total_steps",
    "overlong_buffer_tokens": "overlong_buffer.len",
    "overlong_penalty_factor": "overlong_buffer.penalty_factor",
    "prompts_batch_size_for_trainer": "bs batch_size train_batch_size rollout_batch_size",
    "run_dir": "output_dir default_local_dir save_path",
    "trackers": "report_to logger",
    "train_backend": "strategy",
    "trust_remote_code": "external_trust_remote_code",
    "wandb_project": "project_name",
    "wandb_run_name": "run_name experiment_name",
    "warmup_steps": "lr_warmup_steps num_warmup_steps",
    "weight_decay": "wd",
}
"""Fields, and their names elsewhere. A name with a dot is the end of one."""

# fmt: off
SENTENCES = {
    "beta kl_coef kl_loss_coef use_kl_loss use_kl_in_reward init_kl_coef ref_model":
        "There is no reference model: kl_penalty_tau weighs the KL to the policy that sampled, and 0 is none.",
    "num_train_epochs total_epochs num_epochs epochs num_episodes":
        "Set number_of_steps: an epoch takes as many steps as items / prompts_batch_size_for_trainer.",
    "reward_funcs reward_model reward_fn reward_function custom_reward_function reward_weights remote_rm_url":
        "A reward belongs to an environment (docs/data.md): "
        "environments: [{name: dataset, kwargs: {path: ..., reward: file.py:function}}].",
    "dataset dataset_name train_dataset eval_dataset train_files val_files prompt_data prompt_key":
        "Data belongs to an environment: environments: [{name: dataset, kwargs: {path: FILE or hub id}}] trains on "
        "rows (docs/data.md); `telescope envs list` lists others.",
    "max_prompt_length":
        "max_model_len bounds prompt and answer together. Prompts that leave no space for an answer are left out.",
    "per_device_train_batch_size gradient_accumulation_steps micro_batch_size ppo_micro_batch_size_per_gpu":
        "A step trains prompts_batch_size_for_trainer x group_size samples, packed into rows of seq_len tokens.",
    "num_iterations ppo_epochs steps_per_generation ppo_mini_batch_size":
        "Each batch is trained once, in number_of_minibatches optimizer steps.",
    "epsilon clip_ratio cliprange eps_clip clip_eps":
        "Set use_ppo_clip to true, and clip_low and clip_high to the bounds.",
    "eval_steps test_freq eval_strategy do_eval val_before_train eval_interval":
        "Each entry of evals has its eval_every; eval_before_training and eval_after_training are fields.",
    "n_gpus_per_node nnodes num_gpus num_processes num_nodes world_size":
        "inference_num_workers and trainer_num_workers are numbers of GPUs.",
    "top_k min_p repetition_penalty presence_penalty frequency_penalty generation_kwargs":
        "Only temperature and top_p shape sampling, so that logprobs mean the same to engine and trainer.",
    "use_vllm vllm_mode colocate colocate_all":
        "vLLM always generates; share_gpus puts it on the GPUs of the trainer.",
    "scale_rewards norm_adv_by_std_in_grpo":
        "advantage_norm chooses what advantages are normalized over; dr_grpo does not divide by the deviation.",
    "critic gamma lam gae_lambda vf_coef":
        "There is no critic: advantages are compared within a group.",
    "warmup_ratio lr_warmup_steps_ratio":
        "Set warmup_steps, a number of steps.",
    "logging_steps log_interval":
        "Every step is logged.",
}
# fmt: on
"""Names elsewhere, and what to know instead of a field."""

FIELD_OF = {name: field for field, names in FIELDS.items() for name in names.split()}
SENTENCE_OF = {name: sentence for names, sentence in SENTENCES.items() for name in names.split()}


def hint(name: str, known: Iterable[str], value: Any = None) -> str:
    """Returns what an unknown name means here, after a space, or nothing. A section's value is a mapping."""
    known = list(known)
    if isinstance(value, Mapping):
        meant = {leaf: _meaning(leaf, known) for leaf in _leaves(value)}
        fields = [f"{leaf} is {field}" if leaf != field else leaf for leaf, (field, _) in meant.items() if field]
        sentences = dict.fromkeys(sentence for _, sentence in meant.values() if sentence)
        flat = f" The file is flat: write {', '.join(fields)} without '{name}'." if fields else ""
        if flat or sentences:
            return flat + "".join(f" {sentence}" for sentence in sentences)
    field, sentence = _meaning(name, known)
    if sentence:
        return f" {sentence}"
    return f" Did you mean '{field}'?" if field else did_you_mean(name, known)


def _leaves(value: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _meaning(name: str, known: Collection[str]) -> tuple[str | None, str | None]:
    """Returns the field that a name means, or a sentence, or neither."""
    parts = name.strip().lower().replace("-", "_").split(".")
    for end in (".".join(parts[start:]) for start in range(len(parts))):
        field = end if end in known else FIELD_OF.get(end)
        if field in known or end in SENTENCE_OF:
            return (field, None) if field in known else (None, SENTENCE_OF[end])
    return None, None
