"""Losses on-policy, far off-policy and of nothing, and what they are divided by.

That they and their gradients are those of the papers is shown in `tests/reference`.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.autograd import grad

from telescope.algorithms import TokenBatch, get_algorithm
from telescope.config.algorithms import ALGORITHM_FACTS
from telescope.config.sections.trainer import AlgorithmSection

NAMES = list(ALGORITHM_FACTS)


def settings(**changes: float | str) -> SimpleNamespace:
    return SimpleNamespace(**(AlgorithmSection().model_dump() | {"max_tokens": 32} | changes))


def make_tokens(seed: int = 0, *, on_policy: bool = False) -> TokenBatch:
    """Three samples of 1, 4 and 7 tokens, tokens of different samples interleaved, ratios from 0.2 to 5."""
    rng = np.random.default_rng(seed)
    sample_N = rng.permutation([0] + [1] * 4 + [2] * 7)
    logp_N = torch.from_numpy(-rng.random(12) * 3)
    ref_N = logp_N.clone() if on_policy else logp_N + torch.from_numpy(rng.normal(0, 0.8, 12))
    return TokenBatch(
        logp_N=logp_N.requires_grad_(), entropy_N=torch.from_numpy(rng.random(12)), engine_logp_N=ref_N,
        ref_logp_N=ref_N, advantage_N=torch.from_numpy(np.array([0.7, -1.3, 0.2])[sample_N]),
        sample_N=torch.from_numpy(sample_N), num_samples=3,
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gspo"])
def test_on_policy_every_token_level_gradient_is_the_policy_gradient(name):
    tokens = make_tokens(on_policy=True)
    (found,) = grad(get_algorithm(name).token_loss(tokens, settings()).sum(), tokens.logp_N)
    torch.testing.assert_close(found, -tokens.advantage_N)


def test_on_policy_gspo_gives_each_sample_the_same_weight_whatever_its_length():
    tokens = make_tokens(on_policy=True)
    (found,) = grad(get_algorithm("gspo").token_loss(tokens, settings()).sum(), tokens.logp_N)
    per_sample = torch.zeros(3, dtype=torch.float64).index_add(0, tokens.sample_N, found)
    torch.testing.assert_close(per_sample, torch.tensor([-0.7, 1.3, -0.2], dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_a_micro_batch_without_tokens_costs_nothing(name):
    empty = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    tokens = TokenBatch(empty, empty, empty, empty, empty, torch.zeros(0, dtype=torch.int64), 0)
    assert get_algorithm(name).token_loss(tokens, settings()).sum().item() == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_far_off_policy_losses_stay_finite(name):
    tokens = make_tokens()
    tokens.ref_logp_N[:6] -= 1000.0
    tokens.ref_logp_N[6:] += 1000.0
    loss_N = get_algorithm(name).token_loss(tokens, settings())
    (found,) = grad(loss_N.sum(), tokens.logp_N)
    assert torch.isfinite(loss_N).all()
    assert torch.isfinite(found).all()


def test_denominators_are_those_of_the_table():
    kinds = {name: get_algorithm(name).denominator(settings()) for name in NAMES}
    assert kinds == {name: "samples" if name == "gspo" else "tokens" for name in NAMES}
    summed = settings(dr_grpo_loss_agg_mode="token_sum_norm")
    assert get_algorithm("dr_grpo").denominator(summed) == "sample_budget"
