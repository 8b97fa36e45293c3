"""The metrics of a training step, against plain arithmetic on the tokens of the samples."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.documented_metrics import undocumented
from tests.integration.trainer.trainer_cases import ALL_MODIFIERS, make_samples, near_policy

from telescope.trainer.metrics import AGE_NAMES, MAX_ENVIRONMENTS, environment_names
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer

LENGTHS = [5, 31, 12, 7, 9, 28, 19, 3]
ENVIRONMENTS = ["countdown", "wordle", "countdown", "unlisted", "wordle", "countdown", "countdown", "wordle"]
AGES = [0, 1, 0, 3, 9, 0, 2, 40]
LISTED = [SimpleNamespace(name="wordle"), SimpleNamespace(name="countdown")]
VERSION = 50


class Tokens:
    """Every trained token of the samples as arrays, with what the trainer and the engine think of it."""

    def __init__(self, trainer: Trainer, samples: list[Any]) -> None:
        columns: dict[str, list[Any]] = {"delta": [], "age": [], "environment": [], "advantage": [], "sample": []}
        for index, sample in enumerate(samples):
            own_L = np.array([0.0, *trainer.backend.sequence_logprobs(sample.token_ids_L.tolist())])
            delta = (own_L - sample.engine_logprob_L)[sample.trained_L]
            columns["delta"] += delta.tolist()
            columns["age"] += (VERSION - sample.version_L[sample.trained_L]).tolist()
            columns["environment"] += [sample.environment] * len(delta)
            columns["advantage"] += [sample.advantage] * len(delta)
            columns["sample"] += [index] * len(delta)
        self.delta, self.age, self.environment, self.advantage, self.sample = map(np.array, columns.values())
        self.ratio = np.exp(self.delta)
        self.on_policy = np.array([self.age[self.sample == s].max() == 0 for s in self.sample])


def step(one_rank: Any, **changes: Any) -> tuple[Tokens, dict[str, float]]:
    """One training step over samples of several environments and ages."""
    trainer = one_rank(environments=LISTED, **changes)
    samples = near_policy(make_samples(LENGTHS), trainer)
    for sample, environment, age in zip(samples, ENVIRONMENTS, AGES, strict=True):
        sample.environment = environment
        sample.version_L[sample.trained_L] = VERSION - age
    tokens = Tokens(trainer, samples)
    (mine,) = pack_step(samples, step=0, version=VERSION, seq_len=40, num_ranks=1, pad_to_multiple_of=8)
    return tokens, trainer.train_step(mine).metrics


def test_timing_metrics_do_not_depend_on_recording_the_timeline(one_rank):
    metrics = {}
    for tracked in (True, False):
        trainer = one_rank(track_gpu_events=tracked)
        (mine,) = pack_step(make_samples(LENGTHS), step=0, version=0, seq_len=40, num_ranks=1, pad_to_multiple_of=8)
        result = trainer.train_step(mine)
        metrics[tracked] = {name: value for name, value in result.metrics.items() if name.startswith("timing_")}
        assert ("forward" in {span.name for span in result.spans}) == tracked
    assert metrics[False].keys() == metrics[True].keys()
    assert all(metrics[False][f"timing_{operation}_total"] > 0 for operation in ("forward", "backward", "optimizer"))


def test_every_metric_of_a_step_is_documented(one_rank):
    changes = {**ALL_MODIFIERS, "ppo_clip_ref_logprobs": "rollout", "use_tis": False}
    _, clipped = step(one_rank, **changes)
    _, weighted = step(one_rank, use_tis=True)
    assert {"clip/low_share", "loss/penalty", "masked/sequence_ratio/token_share"} <= clipped.keys()
    assert "tis/weight_mean" in weighted
    assert undocumented([*clipped, *weighted]) == []


def test_mismatch_by_environment_counts_on_policy_samples_alone(one_rank):
    tokens, metrics = step(one_rank)
    for name, label in (("countdown", "countdown"), ("wordle", "wordle"), ("unlisted", "other")):
        mine = tokens.environment == name
        prefix = f"environment/{label}"
        assert metrics[f"{prefix}/tokens"] == mine.sum()
        k3 = (tokens.ratio - 1 - tokens.delta)[mine].mean()
        assert metrics[f"{prefix}/kl_divergence_inference"] == pytest.approx(k3, rel=1e-9)
        counted = abs(tokens.delta[mine & tokens.on_policy])
        if not len(counted):
            assert f"{prefix}/logprob_difference_mean" not in metrics
            continue
        assert metrics[f"{prefix}/logprob_difference_mean"] == pytest.approx(counted.mean(), rel=1e-9)
        assert metrics[f"{prefix}/logprob_difference_max"] == pytest.approx(counted.max(), rel=1e-9)
        p95 = np.quantile(counted, 0.95, method="higher")
        assert metrics[f"{prefix}/logprob_difference_p95"] == pytest.approx(p95, rel=0.05)
    assert {key.split("/")[1] for key in metrics if key.startswith("environment/")} == {"countdown", "wordle", "other"}


@pytest.mark.parametrize(("bucket", "ages"), [
    ("age_0", [0]), ("age_1", [1]), ("age_2", [2]), ("age_3_4", [3, 4]), ("age_9_up", range(9, 99)),
])  # fmt: skip
def test_mismatch_by_age_counts_every_token_of_that_age(one_rank, bucket, ages):
    tokens, metrics = step(one_rank)
    mine = np.isin(tokens.age, list(ages))
    difference = abs(tokens.delta[mine])
    prefix = f"staleness/{bucket}"
    assert metrics[f"{prefix}/tokens"] == mine.sum() > 0
    assert metrics[f"{prefix}/logprob_difference_mean"] == pytest.approx(difference.mean(), rel=1e-9)
    assert metrics[f"{prefix}/logprob_difference_max"] == pytest.approx(difference.max(), rel=1e-9)
    outside = ((tokens.ratio < 0.9) | (tokens.ratio > 1.1))[mine].mean()
    assert metrics[f"{prefix}/ratio_outside_share"] == pytest.approx(outside, rel=1e-9)


def test_the_number_of_metrics_stays_bounded(one_rank):
    _, metrics = step(one_rank)
    assert not any(key.startswith("staleness/age_5_8") for key in metrics), "an age without tokens has no metrics"
    assert {key.split("/")[1] for key in metrics if key.startswith("staleness/age")} <= set(AGE_NAMES)
    many = SimpleNamespace(environments=[SimpleNamespace(name=f"e{i}") for i in range(500)])
    assert len(environment_names(many)) == MAX_ENVIRONMENTS


def test_environments_that_share_a_name_have_metrics_of_their_own():
    twice = SimpleNamespace(environments=[SimpleNamespace(name=name) for name in ("dataset", "wordle", "dataset")])
    assert environment_names(twice) == ("dataset#0", "dataset#2", "wordle")


def test_one_environment_has_no_metrics_of_its_own(one_rank):
    trainer = one_rank()
    (mine,) = pack_step(make_samples(LENGTHS), step=0, version=0, seq_len=40, num_ranks=1)
    assert not any(key.startswith("environment/") for key in trainer.train_step(mine).metrics)


def test_clip_shares_count_tokens_whose_bound_binds(one_rank):
    tokens, metrics = step(one_rank, use_ppo_clip=True, clip_low=0.1, clip_high=0.2)
    low, high = (tokens.ratio < 0.9) & (tokens.advantage < 0), (tokens.ratio > 1.2) & (tokens.advantage > 0)
    assert metrics["clip/low_share"] == pytest.approx(low.mean(), rel=1e-9)
    assert metrics["clip/high_share"] == pytest.approx(high.mean(), rel=1e-9)
    assert 0 < low.sum() < len(low)
    assert metrics["staleness/age_1/clip_low_share"] == pytest.approx(low[tokens.age == 1].mean(), rel=1e-9)
    dual = step(one_rank, use_ppo_clip=True, clip_low=0.1, clip_high=0.2, clip_ratio_c=1.3)[1]["clip/high_share"]
    assert dual == pytest.approx((high | ((tokens.ratio > 1.3) & (tokens.advantage < 0))).mean(), rel=1e-9)


def test_clip_shares_of_algorithms_with_bounds_of_their_own(one_rank):
    tokens, metrics = step(one_rank, algorithm="cispo", clip_low=0.1, clip_high=0.2)
    assert metrics["clip/low_share"] == pytest.approx((tokens.ratio < 0.9).mean(), rel=1e-9)
    assert metrics["clip/high_share"] == pytest.approx((tokens.ratio > 1.2).mean(), rel=1e-9)
    tokens, metrics = step(one_rank, algorithm="gspo", clip_low=3e-4, clip_high=4e-4)
    s = np.exp([tokens.delta[tokens.sample == i].mean() for i in tokens.sample])
    assert metrics["clip/low_share"] == pytest.approx(((s < 1 - 3e-4) & (tokens.advantage < 0)).mean(), rel=1e-9)
    assert metrics["clip/high_share"] == pytest.approx(((s > 1 + 4e-4) & (tokens.advantage > 0)).mean(), rel=1e-9)


@pytest.mark.parametrize("mode", ["truncate", "icepop"])
def test_importance_weights_are_reported(one_rank, mode):
    tokens, metrics = step(one_rank, use_tis=True, tis_mode=mode, tis_cap=1.2, tis_floor=0.8)
    outside = (tokens.ratio < 0.8) | (tokens.ratio > 1.2)
    weight = np.where(outside, 0.0, tokens.ratio) if mode == "icepop" else tokens.ratio.clip(0.8, 1.2)
    assert metrics["tis/weight_mean"] == pytest.approx(weight.mean(), rel=1e-9)
    assert metrics["tis/truncated_share"] == pytest.approx(outside.mean(), rel=1e-9)
    mine = tokens.environment == "countdown"
    assert metrics["environment/countdown/tis_weight_mean"] == pytest.approx(weight[mine].mean(), rel=1e-9)


def test_masked_answers_are_reported_in_tokens_and_in_samples(one_rank):
    tokens, metrics = step(one_rank, seq_is_masking=True, seq_is_mask_low=0.95, seq_is_mask_high=1.05)
    mean = np.exp([tokens.delta[tokens.sample == i].mean() for i in range(len(LENGTHS))])
    masked = (mean < 0.95) | (mean > 1.05)
    assert 0 < masked.sum() < len(masked)
    assert metrics["masked/sequence_ratio/sample_share"] == pytest.approx(masked.mean(), rel=1e-9)
    assert metrics["masked/sequence_ratio/token_share"] == pytest.approx(masked[tokens.sample].mean(), rel=1e-9)


def test_what_is_off_has_no_metrics(one_rank):
    _, metrics = step(one_rank)
    assert not [key for key in metrics if key.startswith(("clip/", "tis/", "masked/")) or key == "loss/penalty"]


def test_the_gradient_norm_is_the_mean_over_optimizer_steps(one_rank):
    trainer = one_rank(learning_rate=1e-12)
    samples = make_samples(LENGTHS)

    def norm(part: list[Any], num_minibatches: int) -> float:
        (mine,) = pack_step(part, step=0, version=0, seq_len=64, num_ranks=1, num_minibatches=num_minibatches)
        return trainer.train_step(mine).metrics["grad_norm"]

    both = [norm(samples[:4], 1), norm(samples[4:], 1)]
    assert norm(samples, 2) == pytest.approx(sum(both) / 2, rel=1e-6)
    assert both[0] != pytest.approx(both[1], rel=0.01)
