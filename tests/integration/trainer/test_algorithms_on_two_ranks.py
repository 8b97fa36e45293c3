"""Every algorithm, and every modifier, on two ranks over gloo: gradients, metrics and weights are those of one rank."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integration.trainer.trainer_cases import (
    ALL_MODIFIERS,
    gradients,
    make_config,
    make_samples,
    near_policy,
    relative_error,
    run_here,
    run_ranks,
    weights,
)

from telescope.algorithms import compute_advantages
from telescope.config.algorithms import ALGORITHM_FACTS
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.packing import pack_step
from telescope.trainer.timeline import Timeline
from telescope.trainer.worker import Trainer

LENGTHS = [5, 31, 12, 7, 2, 28, 19, 3, 16, 9, 24, 11]
CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ALGORITHM_FACTS},
    "every_modifier": ALL_MODIFIERS,
}


def settings(case: str, model: str) -> Any:
    norm = "batch" if case == "reinforce_pp" else "group"
    return make_config(model, **{"advantage_norm": norm, "ppo_clip_ref_logprobs": "batch", **CASES[case]})


def job(trainer: Trainer) -> dict[str, Any]:
    """The gradient of one optimizer step, then a training step of two optimizer steps."""
    backend: Any = trainer.backend
    config = trainer.config
    samples = near_policy(make_samples(LENGTHS), trainer)
    for index, sample in enumerate(samples):
        sample.environment = ("countdown", "elsewhere")[index % 2]
        sample.version_L[sample.trained_L] = -(index % 3)
    compute_advantages(samples, config.algorithm, config.advantage_norm)

    def packed(num_minibatches: int) -> Any:
        return pack_step(
            samples, step=0, version=0, seq_len=40, num_ranks=trainer.world_size, pad_to_multiple_of=8,
            num_minibatches=num_minibatches,
        )[trainer.rank]  # fmt: skip

    sums = StepMetrics(backend.device, backend.environments)
    backend.accumulate(packed(1).minibatches[0], 0, Timeline(backend.device, trainer.rank), sums)
    found: dict[str, Any] = {"gradient": gradients(trainer), "metrics": sums.reduce()}
    result = trainer.train_step(packed(2))
    found["step_metrics"] = {k: v for k, v in result.metrics.items() if not k.startswith(("timing", "micro_batches"))}
    found["weights"] = weights(trainer)
    return found


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """By case: what one rank finds, in this process, and what two ranks find, in processes of their own."""
    configs = {case: settings(case, models["untied64"]) for case in CASES}
    on_two = run_ranks(
        [(job, config, ()) for config in configs.values()], num_ranks=2, folder=tmp_path_factory.mktemp("ranks")
    )
    return {
        case: (run_here((job, config, ())), two) for (case, config), two in zip(configs.items(), on_two, strict=True)
    }


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_gradient_of_one(runs, case):
    one, two = runs[case]
    for rank in two:
        assert relative_error(rank["gradient"], one["gradient"]) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_report_the_metrics_of_one(runs, case):
    one, two = runs[case]
    for key in ("metrics", "step_metrics"):
        assert two[0][key] == two[1][key]
        assert two[0][key] == pytest.approx(one[key], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_two_optimizer_steps_on_two_ranks_give_the_weights_of_one(runs, case):
    one, two = runs[case]
    for rank in two:
        assert relative_error(rank["weights"], one["weights"]) < 1e-10
