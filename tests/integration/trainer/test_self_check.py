"""The measurements of a rank for `telescope verify`: right numbers, and differences where they exist."""

import dataclasses

import pytest
import torch
from tests.integration.trainer.trainer_cases import make_samples, weights

from telescope.trainer.packing import pack_step
from telescope.trainer.self_check import compare_gradients

LENGTHS = [5, 31, 12, 7, 2, 28, 19, 3]


def test_two_packings_have_one_gradient_and_nothing_is_changed(one_rank):
    trainer = one_rank("untied64")
    samples = make_samples(LENGTHS)
    before = weights(trainer)
    (first,) = pack_step(samples, step=0, version=0, seq_len=64, num_ranks=1)
    (second,) = pack_step(samples[::-1], step=0, version=0, seq_len=33, num_ranks=1)
    found = compare_gradients(trainer.backend, first, second)
    assert found.relative_error < 1e-12
    assert found.norms[0] == pytest.approx(found.norms[1], rel=1e-12)
    assert found.norms[0] > 0
    assert found.losses[0] == pytest.approx(found.losses[1], rel=1e-11)
    assert found.num_micro_batches[0] < found.num_micro_batches[1]
    after = weights(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in trainer.backend.policy.parameters())


def test_a_token_that_weighs_more_in_one_packing_shows(one_rank):
    """The mean of means: as if the denominator were the micro-batch's own."""
    trainer = one_rank("untied64")
    samples = make_samples(LENGTHS)
    (first,) = pack_step(samples, step=0, version=0, seq_len=64, num_ranks=1)
    wrong = [dataclasses.replace(sample, advantage=sample.advantage * (1 + i % 2)) for i, sample in enumerate(samples)]
    (second,) = pack_step(wrong, step=0, version=0, seq_len=64, num_ranks=1)
    assert compare_gradients(trainer.backend, first, second).relative_error > 0.05
