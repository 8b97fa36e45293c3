"""The weights after several training steps equal the reference's AdamW at the scheduled rate."""

from __future__ import annotations

import pytest
from tests.integration.trainer.trainer_cases import relative_error, weights
from tests.reference.optimizer import AdamW, clipped, cosine_rate
from tests.reference.step import gradient_of, step_loss
from tests.reference.test_against_the_papers import as_reference_model, batch, reference_advantages

from telescope.algorithms import compute_advantages
from telescope.trainer.packing import pack_step

SETTINGS = {
    "weight_decay": 0.3, "lr_scheduler": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1, "number_of_steps": 4,
    "grad_clip": 0.5,
}  # fmt: skip


def test_training_steps_are_adamw_with_decayed_matrices_at_the_scheduled_rate(one_rank, models):
    trainer = one_rank("untied64", **SETTINGS)
    config, reference = trainer.config, AdamW()
    samples = batch(as_reference_model(trainer, models["untied64"]), config.temperature, far=False)
    compute_advantages(samples)
    advantages = [a for a, s in zip(reference_advantages(samples, config), samples, strict=True) if s.num_trained]
    trained = [s for s in samples if s.num_trained]
    for step in range(config.number_of_steps):
        lm = as_reference_model(trainer, models["untied64"])
        gradients = clipped(gradient_of(lm, step_loss(lm, trained, advantages, config)), config.grad_clip)
        rate = cosine_rate(step, config)
        expected = reference.step(weights(trainer), gradients, rate, config.weight_decay)
        (mine,) = pack_step(samples, step=step, version=step, seq_len=64, num_ranks=1)
        metrics = trainer.train_step(mine).metrics
        assert metrics["grad_norm"] > config.grad_clip, "the gradient is clipped in every step"
        assert metrics["learning_rate"] == pytest.approx(rate, rel=1e-12)
        assert relative_error(weights(trainer), expected) < 1e-10
