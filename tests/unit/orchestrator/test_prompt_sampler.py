"""The prompt sampler is a pure function of (seed, n)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from telescope.orchestrator.prompt_sampler import PromptSampler
from telescope.rollout.sample import request_seed


@given(seed=st.integers(0, 2**31), order=st.permutations(list(range(0, 3000, 97))))
def test_a_prompt_does_not_depend_on_the_order_of_calls(seed, order):
    straight = PromptSampler(seed, [50, 7], [1.0, 3.0], [0, 0])
    shuffled = PromptSampler(seed, [50, 7], [1.0, 3.0], [0, 0])
    expected = {n: straight.prompt(n) for n in sorted(order)}
    assert {n: shuffled.prompt(n) for n in order} == expected


@given(size=st.integers(1, 300), held_out=st.integers(0, 40))
def test_each_epoch_visits_every_item_once_and_no_held_out_item(size, held_out):
    sampler = PromptSampler(5, [size + held_out], [1.0], [held_out])
    for epoch in range(3):
        seen = [sampler.prompt(epoch * size + i) for i in range(size)]
        assert sorted(prompt.index for prompt in seen) == list(range(held_out, held_out + size))
        assert {prompt.epoch for prompt in seen} == {epoch}


def test_epochs_and_seeds_are_shuffled_differently():
    one, other = (PromptSampler(seed, [100], [1.0], [0]) for seed in (1, 2))
    orders = [[one.prompt(n).index for n in range(start, start + 100)] for start in (0, 100)]
    orders.append([other.prompt(n).index for n in range(100)])
    assert len({tuple(order) for order in (*orders, sorted(orders[0]))}) == 4


def test_environments_are_sampled_by_weight():
    sampler = PromptSampler(1, [10, 10, 10], [0.2, 0.3, 0.5], [0, 0, 0])
    counts = np.bincount([sampler.prompt(n).environment for n in range(20_000)], minlength=3) / 20_000
    np.testing.assert_allclose(counts, [0.2, 0.3, 0.5], atol=0.02)


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(0, 64), st.integers(0, 8))
def test_request_seeds_are_reproducible_and_differ_by_sample_and_turn(seed, n, sample, turn):
    value = request_seed(seed, n, sample, turn)
    assert value == request_seed(seed, n, sample, turn)
    assert 0 <= value < 2**31
    assert value != request_seed(seed, n, sample, turn + 1)
    assert value != request_seed(seed, n, sample + 1, turn)
