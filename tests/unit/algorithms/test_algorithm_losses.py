"""Every algorithm against its formula written as scalar loops over samples, in float64."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.unit.algorithms.test_advantages import Scored
from torch.autograd import grad

from telescope.algorithms import TokenBatch, compute_advantages, get_algorithm
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


def reference_sum(name: str, tokens: TokenBatch, config: SimpleNamespace) -> torch.Tensor:
    """The sum of losses by the table, one token or one sample at a time."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    total = torch.zeros((), dtype=torch.float64)
    if name == "gspo":
        for sample in range(tokens.num_samples):
            mine = [t for t in range(12) if int(tokens.sample_N[t]) == sample]
            mean = sum((tokens.logp_N[t] - tokens.ref_logp_N[t]) for t in mine) / len(mine)
            ratio, advantage = mean.exp(), float(tokens.advantage_N[mine[0]])
            total = total - torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
        return total
    for t in range(12):
        logp, advantage = tokens.logp_N[t], float(tokens.advantage_N[t])
        ratio = (logp - tokens.ref_logp_N[t]).exp()
        if name == "cispo":
            total = total - ratio.detach().clamp(low, high) * advantage * logp
        elif name == "sapo":
            tau = config.sapo_tau_pos if advantage > 0 else config.sapo_tau_neg
            total = total - 4 / tau / (1 + (-tau * (ratio - 1)).exp()) * advantage
        else:
            total = total - advantage * logp
    return total


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bounds", [{}, {"clip_low": 3e-4, "clip_high": 4e-4}])
def test_loss_and_gradient_equal_the_formula(name, seed, bounds):
    tokens, config = make_tokens(seed), settings(**bounds)
    found = get_algorithm(name).token_loss(tokens, config)
    assert found.shape == tokens.logp_N.shape
    wanted = reference_sum(name, tokens, config)
    torch.testing.assert_close(found.sum(), wanted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad(found.sum(), tokens.logp_N), grad(wanted, tokens.logp_N), rtol=1e-12, atol=1e-14)


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


def test_baselines_are_those_of_the_table():
    rewards = [0.0, 1.0, 5.0]
    spread = math.sqrt(7.0) + 1e-4  # deviations -2, -1, 3; (4 + 1 + 9) / 2
    wanted = {
        "rloo": [0.0 - 3.0, 1.0 - 2.5, 5.0 - 0.5],
        "dr_grpo": [-2.0, -1.0, 3.0],
        **{name: [-2 / spread, -1 / spread, 3 / spread] for name in ("grpo", "cispo", "gspo", "sapo")},
    }
    for name, advantages in wanted.items():
        assert compute_advantages([Scored(0, r) for r in rewards], algorithm=name) == pytest.approx(advantages)
