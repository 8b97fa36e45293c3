"""Every algorithm, and every modifier, on two ranks over gloo: gradients, metrics and weights are those of one rank.

The two ranks have rows of their own, or share each row (context parallelism).
"""

from typing import Any

import pytest
from tests.integration.trainer.trainer_cases import (
    ALL_MODIFIERS,
    gradients,
    make_config,
    make_samples,
    near_policy,
    packed_share,
    relative_error,
    run_here,
    run_ranks,
    weights,
)

from telescope.algorithms import compute_advantages
from telescope.config.algorithms import ALGORITHM_FACTS
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.worker import Trainer
from telescope.utils.timeline import Timeline

LENGTHS = [5, 31, 12, 7, 2, 28, 19, 3, 16, 9, 24, 11]
CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ALGORITHM_FACTS},
    "every_modifier": ALL_MODIFIERS,
}


PACKINGS: list[dict[str, int]] = [
    {"seq_len": 31, "pad_to_multiple_of": 1},
    {"seq_len": 64, "pad_to_multiple_of": 1},
    {"seq_len": 200, "pad_to_multiple_of": 64},
]
"""Rows that are cut elsewhere: through samples, between two, and in the padding."""
SHARING = {"own_rows": 1, "shared_rows": 2}
BY_SHARING = pytest.mark.parametrize("sharing", SHARING)
RECORDED = frozenset({"s1", "s5", "s7"})


def settings(case: str, model: str, num_sharing: int = 1) -> Any:
    norm = "batch" if case == "reinforce_pp" else "group"
    changes = {"advantage_norm": norm, "ppo_clip_ref_logprobs": "batch", **CASES[case]}
    return make_config(model, fsdp_context_parallel_size=num_sharing, **changes)


def job(trainer: Trainer) -> dict[str, Any]:
    """The gradient of one optimizer step in several packings, then a training step of two optimizer steps."""
    backend: Any = trainer.backend
    config = trainer.config
    samples = near_policy(make_samples(LENGTHS), trainer)
    for index, sample in enumerate(samples):
        sample.environment = ("countdown", "elsewhere")[index % 2]
        sample.version_L[sample.trained_L] = -(index % 3)
    compute_advantages(samples, config.algorithm, config.advantage_norm)

    def accumulated(**packing: int) -> tuple[dict[str, Any], dict[str, float]]:
        sums = StepMetrics(backend.device, backend.environments)
        (batch,) = packed_share(trainer, samples, **packing).minibatches
        backend.accumulate(batch, 0, Timeline(backend.device, trainer.rank), sums)
        return gradients(trainer), sums.reduce()

    found: dict[str, Any] = {}
    found["gradient"], found["metrics"] = accumulated()
    found["repacked"] = []
    for packing in PACKINGS:
        gradient, metrics = accumulated(**packing)
        found["repacked"].append((relative_error(gradient, found["gradient"]), metrics))
    mine = packed_share(trainer, samples, num_minibatches=2)
    mine.recorded = RECORDED
    result = trainer.train_step(mine)
    found["step_metrics"] = {k: v for k, v in result.metrics.items() if not k.startswith(("timing", "micro_batches"))}
    found["tokens"] = {tokens.sample_id: tokens for tokens in result.tokens}
    found["weights"] = weights(trainer)
    return found


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """By case: what one rank finds, in this process, and what two ranks find, in processes of their own."""
    model = models["untied64"]
    configs = {(case, sharing): settings(case, model, SHARING[sharing]) for case in CASES for sharing in SHARING}
    on_two = run_ranks(
        [(job, config, ()) for config in configs.values()], num_ranks=2, folder=tmp_path_factory.mktemp("ranks")
    )
    found: dict[str, dict[str, Any]] = {case: {"one": run_here((job, settings(case, model), ()))} for case in CASES}
    for (case, sharing), two in zip(configs, on_two, strict=True):
        found[case][sharing] = two
    return found


@BY_SHARING
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_gradient_of_one_in_any_packing(runs, case, sharing):
    one, two = runs[case]["one"], runs[case][sharing]
    for rank in two:
        assert relative_error(rank["gradient"], one["gradient"]) < 1e-12
        assert max(error for error, _ in rank["repacked"]) < 1e-12


@BY_SHARING
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_report_the_metrics_of_one(runs, case, sharing):
    one, two = runs[case]["one"], runs[case][sharing]
    for key in ("metrics", "step_metrics"):
        assert two[0][key] == two[1][key]
        assert two[0][key] == pytest.approx(one[key], rel=1e-10, abs=1e-12)
    for (_, metrics), (_, wanted) in zip(two[0]["repacked"], one["repacked"], strict=True):
        assert metrics == pytest.approx(wanted, rel=1e-10, abs=1e-12)


@BY_SHARING
@pytest.mark.parametrize("case", CASES)
def test_two_optimizer_steps_on_two_ranks_give_the_weights_of_one(runs, case, sharing):
    one, two = runs[case]["one"], runs[case][sharing]
    for rank in two:
        assert relative_error(rank["weights"], one["weights"]) < 1e-10


@BY_SHARING
def test_the_recorded_tokens_of_a_sample_come_from_one_rank(runs, sharing):
    for found in runs.values():
        one, (first, second) = found["one"]["tokens"], (rank["tokens"] for rank in found[sharing])
        assert first.keys() | second.keys() == one.keys() == RECORDED
        assert not first.keys() & second.keys()
        for name, tokens in (first | second).items():
            for array in ("token_ids_L", "trained_L", "trainer_logprob_L", "entropy_L"):
                assert getattr(tokens, array) == pytest.approx(getattr(one[name], array), nan_ok=True, rel=1e-6)
