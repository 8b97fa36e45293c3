"""The loss of one optimizer step, and its gradient, from a transformers model: no packing, no padding, no ranks."""

from __future__ import annotations

from typing import Any

import torch
from tests.reference.corrections import entropy, importance_weight, is_answer_masked, kl
from tests.reference.policy_gradients import clipped, plain
from tests.reference.ratio_losses import cispo, gspo, sapo

WITH_RATIO = {"cispo": cispo, "gspo": gspo, "sapo": sapo}


def tokens_of(lm: Any, sample: Any, temperature: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logprob and entropy of each trained token of a sample, in its order, at the sampling temperature."""
    logits_LV = lm(torch.tensor(sample.token_ids_L)[None]).logits[0] / temperature
    trained = [t for t in range(len(sample.token_ids_L)) if sample.trained_L[t]]
    logps = [logits_LV[t - 1][sample.token_ids_L[t]] - torch.logsumexp(logits_LV[t - 1], dim=0) for t in trained]
    return logps, [entropy(logits_LV[t - 1]) for t in trained]


def step_loss(lm: Any, samples: list[Any], advantages: list[float], config: Any, before: Any = None) -> torch.Tensor:
    """The loss of an optimizer step over `samples`. `before` is the model that the batch started from (None: `lm`)."""
    has_ratio = config.algorithm in WITH_RATIO or config.use_ppo_clip
    family = clipped if config.use_ppo_clip else WITH_RATIO.get(config.algorithm, plain)
    policy = penalty = torch.zeros((), dtype=torch.float64)
    num_tokens = 0
    for sample, advantage in zip(samples, advantages, strict=True):
        logps, entropies = tokens_of(lm, sample, config.temperature)
        engine = [float(e) for e, trained in zip(sample.engine_logprob_L, sample.trained_L, strict=True) if trained]
        num_tokens += len(engine)
        trainer = [logp.item() for logp in logps]
        refs = engine
        if has_ratio and config.ppo_clip_ref_logprobs == "batch":
            # The ratio of the loss goes back to the start of the batch; what is left to correct starts there.
            refs = trainer = [logp.item() for logp in tokens_of(before or lm, sample, config.temperature)[0]]
        if config.seq_is_masking and is_answer_masked(trainer, engine, config):
            continue
        losses = family(logps, refs, advantage, config)
        for i, loss in enumerate(losses):
            weight = importance_weight(trainer[i], engine[i], config) if config.use_tis else 1.0
            policy = policy + weight * loss
            penalty = penalty + config.kl_penalty_tau * kl(logps[i], engine[i], config.kl_estimator)
            penalty = penalty - config.entropy_coef * entropies[i]
    return policy / denominator(config, num_tokens, len(samples)) + penalty / num_tokens


def denominator(config: Any, num_tokens: int, num_samples: int) -> int:
    """GSPO averages over samples; Dr. GRPO may divide by a constant (its listing 1); the others by tokens, as DAPO."""
    if config.algorithm == "gspo":
        return num_samples
    if config.algorithm == "dr_grpo" and config.dr_grpo_loss_agg_mode == "token_sum_norm":
        return num_samples * int(config.max_tokens)
    return num_tokens


def gradient_of(lm: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient by parameter name; the model's own gradients are left alone."""
    names, parameters = zip(*lm.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True))
