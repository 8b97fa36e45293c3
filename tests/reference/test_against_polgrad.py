"""Advantages, losses and penalties equal polgrad's, a library of reference semantics by other authors that was compared
with the code of verl and OpenRLHF: value and gradient on random right-padded batches, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import polgrad
import pytest
import torch
from polgrad import Aggregation, ClipConfig, ISCorrectionConfig, KLEstimator, PolicyLossConfig, RatioKind, SurrogateKind
from polgrad.testing import random_batches
from tests.unit.algorithms.test_advantages import Scored

from telescope.algorithms import TokenBatch, compute_advantages, get_algorithm
from telescope.algorithms.loss import kl_to_rollout_policy, loss_terms
from telescope.config.loader import build_config
from telescope.trainer.loss import denominator

BUDGET = 24
CLIP = {"use_ppo_clip": True, "clip_low": 0.2, "clip_high": 0.28, "ppo_clip_ref_logprobs": "batch"}
TIS = {"use_tis": True, "tis_cap": 1.5}
BOUNDS = ClipConfig(0.2, 0.28)


def polgrad_loss(surrogate: SurrogateKind, clip: ClipConfig | None = None, **changes: Any) -> PolicyLossConfig:
    """A token-mean loss with a ratio of each token, unless `changes` say otherwise."""
    defaults = {"ratio": RatioKind.TOKEN, "aggregation": Aggregation.TOKEN_MEAN, "norm_len": BUDGET}
    return PolicyLossConfig(surrogate=surrogate, clip=clip, **defaults | changes)


POLICY_GRADIENT = polgrad_loss(SurrogateKind.REINFORCE)
CASES: dict[str, tuple[dict[str, Any], PolicyLossConfig]] = {
    **{name: ({"algorithm": name}, POLICY_GRADIENT) for name in ("grpo", "rloo", "reinforce_pp")},
    "dr_grpo-token_mean": ({"algorithm": "dr_grpo", "dr_grpo_loss_agg_mode": "token_mean"}, POLICY_GRADIENT),
    "dr_grpo-token_sum_norm": (
        {"algorithm": "dr_grpo", "dr_grpo_loss_agg_mode": "token_sum_norm"},
        polgrad_loss(SurrogateKind.REINFORCE, aggregation=Aggregation.TOKEN_SUM_NORM),
    ),
    "dapo": ({"algorithm": "grpo", **CLIP}, polgrad_loss(SurrogateKind.PG_CLIP, BOUNDS)),
    "dual-clip": (
        {"algorithm": "grpo", **CLIP, "clip_ratio_c": 2.0},
        polgrad_loss(SurrogateKind.PG_CLIP, ClipConfig(0.2, 0.28, ratio_cap=2.0)),
    ),
    "clip-tis": (
        {"algorithm": "grpo", **CLIP, **TIS},
        polgrad_loss(SurrogateKind.PG_CLIP, BOUNDS, is_correction=ISCorrectionConfig(cap=1.5)),
    ),
    "cispo": (
        {"algorithm": "cispo", "clip_low": 0.2, "clip_high": 0.28, "ppo_clip_ref_logprobs": "batch"},
        polgrad_loss(SurrogateKind.CISPO, BOUNDS),
    ),
    "gspo": (
        {"algorithm": "gspo", "clip_low": 0.1, "clip_high": 0.15, "ppo_clip_ref_logprobs": "batch"},
        polgrad_loss(
            SurrogateKind.PG_CLIP, ClipConfig(0.1, 0.15), ratio=RatioKind.SEQUENCE,
            aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
        ),
    ),
}  # fmt: skip


def config_of(fields: dict[str, Any]) -> Any:
    norm = {"advantage_norm": "batch"} if fields.get("algorithm") == "reinforce_pp" else {}
    return build_config({"model": "m", "environments": [{"name": "countdown"}], "max_tokens": BUDGET, **norm, **fields})


def tokens_of(batch: dict[str, torch.Tensor]) -> TokenBatch:
    """The response tokens of a batch [B, T], as the loss gets them from a packed row."""
    mask = batch["response_mask"]
    sample_N = torch.nonzero(mask)[:, 0]
    return TokenBatch(
        logp_N=batch["logprobs"][mask], entropy_N=torch.zeros(len(sample_N), dtype=torch.float64),
        engine_logp_N=batch["rollout_logprobs"][mask], ref_logp_N=batch["old_logprobs"][mask],
        advantage_N=batch["advantages"][sample_N], sample_N=sample_N, num_samples=len(mask),
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_polgrads(case):
    fields, theirs = CASES[case]
    config = config_of(fields)
    algorithm = get_algorithm(config.algorithm)
    for batch in random_batches(40, [(4, 8), (3, 20), (1, 5)], seed=7):
        logp = batch["logprobs"].requires_grad_()
        step: Any = SimpleNamespace(num_trained_tokens=int(batch["response_mask"].sum()), num_samples=len(logp))
        ours = loss_terms(algorithm, tokens_of(batch), config).policy_N.sum() / denominator(algorithm, step, config)
        expected = polgrad.policy_loss(theirs, **batch).loss
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
        gradients = [torch.autograd.grad(loss, logp)[0] for loss in (ours, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "kind"), [("k2", KLEstimator.K2), ("k3", KLEstimator.K3)])
def test_the_penalty_equals_polgrads_estimate_of_the_engines_divergence(name, kind):
    config = config_of({"kl_penalty_tau": 1.0, "kl_estimator": name})
    for batch in random_batches(40, [(4, 8), (3, 20)], seed=8):
        mask, logp = batch["response_mask"], batch["logprobs"].requires_grad_()
        ours = kl_to_rollout_policy(tokens_of(batch), config)
        expected = polgrad.kl_estimate(batch["rollout_logprobs"], logp, kind, response_mask=mask)[mask]
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
        gradients = [torch.autograd.grad(values.sum(), logp)[0] for values in (ours, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


ADVANTAGES = {
    "grpo": lambda rewards, groups: polgrad.grpo_advantages(rewards, groups, polgrad.GroupNormConfig()),
    "dr_grpo": lambda rewards, groups: polgrad.grpo_advantages(rewards, groups, polgrad.GroupNormConfig(scale="none")),
    "rloo": polgrad.rloo_advantages,
    "reinforce_pp": lambda rewards, groups: polgrad.reinforce_pp_advantages(
        rewards, groups, config=polgrad.ReinforcePPConfig(batch_norm=True, eps=1e-4)
    ),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_equal_polgrads(name):
    generator = np.random.default_rng(3)
    for _ in range(40):
        groups = np.repeat(np.arange(5), generator.integers(2, 6, 5))
        rewards = generator.normal(size=len(groups))
        samples = [Scored(int(group), float(reward)) for group, reward in zip(groups, rewards, strict=True)]
        ours = compute_advantages(samples, name, "batch" if name == "reinforce_pp" else "group")
        expected = ADVANTAGES[name](torch.from_numpy(rewards), torch.from_numpy(groups))
        np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-12, atol=1e-14)
