"""Every algorithm and every modifier, through packing, the sharded model and the chunked output layer, equals the loops
of this folder: the loss and the gradient with respect to all parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.integration.trainer.trainer_cases import gradients, make_samples, relative_error, weights
from tests.reference import rewards as reference_rewards
from tests.reference.step import gradient_of, step_loss, tokens_of
from transformers import AutoModelForCausalLM

from telescope.algorithms import compute_advantages
from telescope.config.algorithms import ALGORITHM_FACTS
from telescope.config.loader import build_config
from telescope.trainer.batch import TrainSample
from telescope.trainer.loss import denominator
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.packing import pack_step, split_groups
from telescope.trainer.worker import Trainer
from telescope.utils.timeline import Timeline

BOUNDS = {"float64": 1e-12, "float32": 1e-6}
LENGTHS = [5, 31, 12, 7, 2, 28, 19, 3, 16, 9, 24, 11, 14, 8, 6, 21]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4, 4]
REWARDS = [0.0, 1.0, 0.3, 0.0, 2.0, 0.5, 0.5, 1.0, 0.7, 0.7, 0.7, 0.7, 1.5, 0.0, 1.0, 1.0]
"""Group 2 has equal rewards, group 3 one sample; one sample of group 1 is masked."""
MASKED = 6

CLIP = {"use_ppo_clip": True, "clip_low": 0.1, "clip_high": 0.15}
BATCH = {"ppo_clip_ref_logprobs": "batch", "number_of_minibatches": 2}
TIS = {"use_tis": True, "tis_cap": 1.1}
OWN_BOUNDS = {
    "cispo": {"clip_low": 0.1, "clip_high": 0.15},
    "gspo": {"clip_low": 3e-2, "clip_high": 4e-2},
    "sapo": {"sapo_tau_neg": 1.4},
}
WITHOUT_RATIO = [name for name, facts in ALGORITHM_FACTS.items() if not facts.holds_ratio]

CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name, **OWN_BOUNDS.get(name, {})} for name in ALGORITHM_FACTS},
    **{f"{name}-defaults": {"algorithm": name} for name in OWN_BOUNDS},
    **{f"{name}-batch-reference": {"algorithm": name, **bounds, **BATCH} for name, bounds in OWN_BOUNDS.items()},
    **{f"{name}-tis": {"algorithm": name, **bounds, **BATCH, **TIS} for name, bounds in OWN_BOUNDS.items()},
    **{f"{name}-clip": {"algorithm": name, **CLIP} for name in WITHOUT_RATIO},
    **{f"{name}-tis": {"algorithm": name, **TIS} for name in WITHOUT_RATIO},
    "grpo-batch-norm": {"advantage_norm": "batch"},
    "gspo-batch-norm": {"algorithm": "gspo", "advantage_norm": "batch"},
    "dr_grpo-token_sum_norm": {"algorithm": "dr_grpo", "dr_grpo_loss_agg_mode": "token_sum_norm"},
    "minibatches": {"number_of_minibatches": 2},
    "temperature": {"temperature": 0.7, "entropy_coef": 0.3, **CLIP},
    "clip-batch-reference": {**CLIP, **BATCH},
    "dual-clip": {**CLIP, "clip_ratio_c": 1.2},
    "clip-batch-reference-tis": {**CLIP, **BATCH, **TIS},
    "tis-floor": {**TIS, "tis_floor": 0.9},
    "tis-clamp": {**TIS, "tis_logprob_clamp": 0.05},
    "icepop": {**TIS, "tis_mode": "icepop"},
    "icepop-clamp": {**TIS, "tis_mode": "icepop", "tis_logprob_clamp": 0.05},
    "icepop-floor": {**TIS, "tis_mode": "icepop", "tis_floor": 0.9},
    "sequence-mask": {"seq_is_masking": True, "seq_is_mask_low": 0.95, "seq_is_mask_high": 1.05},
    "kl-k2": {"kl_penalty_tau": 0.4, "kl_estimator": "k2"},
    "kl-k3": {"kl_penalty_tau": 0.4},
    "kl-k2-far": {"kl_penalty_tau": 0.4, "kl_estimator": "k2"},
    "kl-k3-far": {"kl_penalty_tau": 0.4},
    "clip-far": CLIP,
    "entropy": {"entropy_coef": 0.3},
    "entropy-negative": {"entropy_coef": -0.3},
    "gspo-penalties": {"algorithm": "gspo", "entropy_coef": 0.3, "kl_penalty_tau": 0.4},
    "everything": {
        **CLIP, **BATCH, **TIS, "clip_ratio_c": 1.2, "tis_mode": "icepop", "tis_floor": 0.9, "seq_is_masking": True,
        "seq_is_mask_low": 0.9, "seq_is_mask_high": 1.1, "kl_penalty_tau": 0.4, "entropy_coef": 0.3,
    },
}  # fmt: skip


def settings(case: dict[str, Any]) -> dict[str, Any]:
    """The fields that a case sets, with what a run adjusts."""
    return {"advantage_norm": "batch"} | case if case.get("algorithm") == "reinforce_pp" else case


def batch(model: Any, temperature: float, *, far: bool) -> list[TrainSample]:
    """Samples whose engine logprobs are some noise away from the model's own, and one of them `far` beyond +-20."""
    rng = np.random.default_rng(1)
    samples = make_samples(LENGTHS)
    for sample, group, reward in zip(samples, GROUPS, REWARDS, strict=True):
        sample.group_id, sample.reward = group, reward
        with torch.no_grad():
            own = [logp.item() for logp in tokens_of(model, sample, temperature)[0]]
        sample.engine_logprob_L = np.zeros(sample.length)
        sample.engine_logprob_L[sample.trained_L] = np.array(own) + rng.normal(0, 0.2, len(own))
    samples[MASKED].trained_L[:] = False
    if far:  # of an answer that is worse than its group, where PPO's clip lets the ratio grow
        samples[0].engine_logprob_L[np.flatnonzero(samples[0].trained_L)[0]] -= 22.0
    return samples


def reference_advantages(samples: list[TrainSample], config: Any) -> list[float]:
    """By the loops, for the samples in their order."""
    groups = [
        [s.reward for s in samples if s.group_id == group and s.num_trained] for group in sorted(set(GROUPS))
    ]  # fmt: skip
    advantages = reference_rewards.of_batch(groups, config.algorithm, config.advantage_norm)
    left = {group: list(values) for group, values in enumerate(advantages)}
    return [left[s.group_id].pop(0) if s.num_trained else 0.0 for s in samples]


def as_reference_model(trainer: Trainer, path: str) -> Any:
    """transformers' model with the trainer's present weights, in float64."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa").eval()
    lm.load_state_dict(weights(trainer), strict=False)
    return lm


def last_optimizer_step(trainer: Trainer, samples: list[TrainSample], config: Any) -> tuple[float, dict]:
    """Loss and gradient of the last optimizer step of a batch, after the steps before it have moved the weights."""
    backend: Any = trainer.backend
    timeline = Timeline(backend.device, 0)
    (mine,) = pack_step(
        samples, step=0, version=0, seq_len=64, num_ranks=1, pad_to_multiple_of=8,
        num_minibatches=config.number_of_minibatches,
    )  # fmt: skip
    references = backend.reference_logprobs(mine.minibatches, timeline)
    *earlier, last = mine.minibatches
    for index, minibatch in enumerate(earlier):
        backend.accumulate(minibatch, 0, timeline, StepMetrics(backend.device), references=references[index])
        backend.optimizer_step(1e-2, denominator(backend.algorithm, minibatch, config), timeline)
    sums = StepMetrics(backend.device)
    backend.accumulate(last, 0, timeline, sums, weights_moved=bool(earlier), references=references[-1])
    metrics = sums.reduce()
    divisor = denominator(backend.algorithm, last, config)
    loss = metrics["loss/policy"] + metrics.get("loss/penalty", 0.0)
    return loss, {name: gradient / divisor for name, gradient in gradients(trainer).items()}


@pytest.mark.parametrize(("model", "dtype"), [("untied64", "float64"), ("tied_calm", "float32")])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_papers(one_rank, models, case, model, dtype):
    trainer = one_rank(model, model_dtype=dtype, **settings(CASES[case]))
    config = trainer.config
    before = as_reference_model(trainer, models[model])
    samples = batch(before, config.temperature, far=case.endswith("-far"))
    compute_advantages(samples, config.algorithm, config.advantage_norm)
    advantages = reference_advantages(samples, config)
    assert [s.advantage for s in samples] == pytest.approx(advantages, rel=1e-13, abs=1e-13)

    found_loss, found = last_optimizer_step(trainer, samples, config)

    usable = [s for s in samples if s.num_trained]
    trained = split_groups(usable, config.number_of_minibatches)[-1]
    now = as_reference_model(trainer, models[model])
    loss = step_loss(now, trained, [advantages[samples.index(s)] for s in trained], config, before)
    wanted = gradient_of(now, loss)
    assert relative_error(found, wanted) < BOUNDS[dtype]
    assert found_loss == pytest.approx(loss.item(), rel=1e2 * BOUNDS[dtype], abs=BOUNDS[dtype])


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_one_that_a_run_may_choose(case):
    build_config({"environments": [{"name": "countdown"}], **CASES[case]})
