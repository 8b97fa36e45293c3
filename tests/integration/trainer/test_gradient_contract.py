"""The loss contract: one sum over all trained tokens divided by one global count, whatever the packing."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.trainer.trainer_cases import ALL_MODIFIERS, gradients, make_samples, near_policy, relative_error
from transformers import AutoModelForCausalLM

from telescope.algorithms import compute_advantages
from telescope.config.algorithms import ALGORITHM_FACTS
from telescope.trainer.batch import TrainSample
from telescope.trainer.loss import denominator
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.packing import pack_step
from telescope.trainer.self_check import packed_logprobs
from telescope.trainer.worker import Trainer
from telescope.utils.timeline import Timeline

LENGTHS = [5, 31, 12, 7, 2, 28, 19, 3, 16, 9, 24, 11]
BOUNDS = {"float64": 1e-12, "float32": 1e-6}


def accumulated(trainer: Trainer, samples: list[TrainSample], **packing: int) -> tuple[dict, dict]:
    """Gradient and metrics of one optimizer step, all ranks' shares computed in this one."""
    backend = trainer.backend
    sums = StepMetrics(backend.device)
    inputs = pack_step(samples, step=0, version=0, **({"seq_len": 64, "num_ranks": 1} | packing))
    for step_input in inputs:
        (minibatch,) = step_input.minibatches
        backend.accumulate(minibatch, 0, Timeline(backend.device, 0), sums)  # type: ignore[attr-defined]
    metrics = sums.reduce()
    divisor = denominator(backend.algorithm, inputs[0].minibatches[0], trainer.config)  # type: ignore[attr-defined]
    return {name: gradient / divisor for name, gradient in gradients(trainer).items()}, metrics


def reference_gradient(model: str, samples: list[TrainSample], temperature: float) -> dict[str, torch.Tensor]:
    """The contract written out over unpacked samples, with transformers' own attention and log-softmax."""
    options = {"attn_implementation": "sdpa", "experts_implementation": "eager"}  # torch groups experts in float32 only
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, **options).eval()
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = sum(sample.num_trained for sample in samples)
    for sample in samples:
        logits_LV = lm(torch.from_numpy(sample.token_ids_L)[None]).logits[0] / temperature
        for t in np.flatnonzero(sample.trained_L):
            logp = logits_LV[t - 1].log_softmax(dim=0)[int(sample.token_ids_L[t])]
            total = total - sample.advantage * logp
    (total / num_tokens).backward()
    return {name: parameter.grad for name, parameter in lm.named_parameters()}


@pytest.mark.parametrize("model", ["tied64", "untied64"])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_gradient_equals_plain_loops_over_single_samples(one_rank, models, model, temperature):
    samples = make_samples(LENGTHS)
    found, _ = accumulated(one_rank(model, temperature=temperature), samples, pad_to_multiple_of=8)
    assert relative_error(found, reference_gradient(models[model], samples, temperature)) < 1e-12


def same_for_any_packing(trainer: Trainer, samples: list[TrainSample], bound: float, max_examples: int) -> None:
    """Checks that gradient and metrics are equal for any packing, share of ranks, padding and order."""
    wanted, wanted_metrics = accumulated(trainer, samples)

    @settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        seq_len=st.integers(31, 200),
        num_ranks=st.integers(1, 4),
        multiple=st.sampled_from([1, 8, 64]),
        order=st.permutations(range(len(samples))),
    )
    def check(seq_len, num_ranks, multiple, order):
        found, metrics = accumulated(
            trainer, [samples[i] for i in order], seq_len=seq_len, num_ranks=num_ranks, pad_to_multiple_of=multiple
        )
        assert relative_error(found, wanted) < bound
        assert metrics == pytest.approx(wanted_metrics, rel=100 * bound, abs=100 * bound)

    check()


@pytest.mark.parametrize(
    ("model", "dtype"), [("untied64", "float64"), ("untied", "float32"), ("tied", "float32"), ("experts", "float32")]
)
def test_gradient_does_not_depend_on_packing(one_rank, model, dtype):
    same_for_any_packing(one_rank(model, model_dtype=dtype), make_samples(LENGTHS), BOUNDS[dtype], max_examples=15)


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", [*ALGORITHM_FACTS, "every modifier"])
def test_gradient_of_every_algorithm_does_not_depend_on_packing(one_rank, algorithm, dtype):
    changes = ALL_MODIFIERS if algorithm == "every modifier" else {"algorithm": algorithm}
    norm = "batch" if algorithm == "reinforce_pp" else "group"
    trainer = one_rank("untied64", model_dtype=dtype, advantage_norm=norm, **changes)
    samples = near_policy(make_samples(LENGTHS), trainer)
    compute_advantages(samples, trainer.config.algorithm, norm)
    same_for_any_packing(trainer, samples, BOUNDS[dtype], max_examples=6)


@pytest.mark.parametrize("model", ["tied64", "untied64"])
def test_gradient_checkpointing_changes_nothing(one_rank, model):
    samples = make_samples(LENGTHS)
    wanted, _ = accumulated(one_rank(model), samples)
    found, _ = accumulated(one_rank(model, gradient_checkpointing=True), samples)
    assert relative_error(found, wanted) < 1e-14


def test_padding_and_dummy_rows_add_exactly_nothing(one_rank):
    trainer = one_rank("untied64")
    samples = make_samples([16, 16, 16], group_size=3)
    lean, lean_metrics = accumulated(trainer, samples, seq_len=16)
    # Four rows for two ranks, one of them a dummy; every row ends in padding.
    heavy, heavy_metrics = accumulated(trainer, samples, seq_len=16, num_ranks=2, pad_to_multiple_of=64)
    assert relative_error(heavy, lean) < 1e-14
    assert heavy_metrics == pytest.approx(lean_metrics, rel=1e-13)


def test_samples_in_packed_rows_have_the_logprobs_that_transformers_gives_each_alone(one_rank, models):
    trainer = one_rank("tied64", temperature=0.7)
    samples = make_samples(LENGTHS)
    lm = AutoModelForCausalLM.from_pretrained(models["tied64"], dtype=torch.float64, attn_implementation="sdpa")
    (step_input,) = pack_step(samples, step=0, version=0, seq_len=64, num_ranks=1)
    assert any(len(row.sample_ids) > 1 for row in step_input.minibatches[0].micro_batches), "rows hold several samples"
    found = packed_logprobs(trainer.backend, step_input)
    for sample in samples:
        tokens_L = torch.from_numpy(sample.token_ids_L)
        with torch.no_grad():
            logp_LV = (lm(tokens_L[None]).logits[0] / 0.7).log_softmax(dim=-1)
        wanted = logp_LV[:-1].gather(1, tokens_L[1:, None]).squeeze(1).numpy()
        assert found[sample.sample_id] == pytest.approx(wanted[sample.trained_L[1:]], abs=1e-12)


def test_a_token_weighs_the_same_beside_one_neighbor_or_thirty(one_rank):
    """The mean of means that this contract rules out would weigh the lone token about ten times as much."""
    trainer = one_rank("tied64")
    samples = make_samples([8, 30], group_size=2)
    for sample in samples:
        sample.advantage = 1.0
    short, long = samples
    both, _ = accumulated(trainer, samples)
    parts = [accumulated(trainer, [sample])[0] for sample in samples]
    share = short.num_trained / (short.num_trained + long.num_trained)
    wanted = {name: share * parts[0][name] + (1 - share) * parts[1][name] for name in both}
    assert relative_error(both, wanted) < 1e-13
