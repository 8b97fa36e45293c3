"""A training step: its metrics, its errors, and its effect on the weights."""

import gc
import shutil
import sys
import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integration.trainer.trainer_cases import VOCAB, make_config, make_samples, relative_error, weights

from telescope.algorithms import compute_advantages
from telescope.config import TelescopeConfig
from telescope.errors import ConfigError, UserError
from telescope.trainer import worker
from telescope.trainer.backends import find_backend
from telescope.trainer.backends.fsdp import sharding
from telescope.trainer.batch import StepInput, TrainSample
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer, choose_device
from telescope.utils.process import freeze_heap, unfreeze_heap

LENGTHS = [5, 31, 12, 7, 2, 28, 19, 3]


def packed(samples: list[TrainSample], *, step: int = 0, version: int = 0, num_minibatches: int = 1) -> StepInput:
    (mine,) = pack_step(samples, step=step, version=version, seq_len=64, num_ranks=1, num_minibatches=num_minibatches)
    return mine


def with_own_logprobs(trainer: Trainer, samples: list[TrainSample], temperature: float = 1.0) -> list[TrainSample]:
    """As if the engine had computed the trainer's own numbers."""
    for sample in samples:
        logprobs = np.array([0.0, *trainer.backend.sequence_logprobs(sample.token_ids_L.tolist(), temperature)])
        sample.engine_logprob_L = np.where(sample.trained_L, logprobs, 0.0)
    return samples


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_on_policy_the_first_step_has_no_kl_and_no_mismatch(one_rank, temperature):
    trainer = one_rank("tied", model_dtype="float32", temperature=temperature)
    samples = with_own_logprobs(trainer, make_samples(LENGTHS), temperature)
    metrics = trainer.train_step(packed(samples)).metrics
    assert metrics["mismatch/on_policy_share"] == 1.0
    assert metrics["mismatch/logprob_difference_max"] < 1e-4
    assert metrics["mismatch/ratio_outside_share"] == 0.0
    assert metrics["kl_divergence_inference"] == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_tokens_of_chosen_samples_are_returned_as_engine_and_trainer_saw_them(one_rank, num_minibatches):
    trainer = one_rank("tied", model_dtype="float32", number_of_minibatches=num_minibatches)
    samples = with_own_logprobs(trainer, make_samples(LENGTHS, version=2))
    chosen = [samples[1], samples[6]]
    step = packed(samples, num_minibatches=num_minibatches)
    step.recorded = frozenset(sample.sample_id for sample in chosen)
    found = {tokens.sample_id: tokens for tokens in trainer.train_step(step).tokens}
    assert found.keys() == step.recorded
    for sample in chosen:
        tokens = found[sample.sample_id]
        assert tokens.token_ids_L.tolist() == sample.token_ids_L.tolist()
        assert tokens.version_L.tolist() == sample.version_L.tolist()
        assert np.isfinite(tokens.trainer_logprob_L).tolist() == sample.trained_L.tolist()
        assert np.isfinite(tokens.entropy_L).tolist() == sample.trained_L.tolist()
    first = found[samples[1].sample_id]
    trained = samples[1].trained_L
    np.testing.assert_allclose(first.trainer_logprob_L[trained], first.engine_logprob_L[trained], atol=1e-4)
    assert np.all(first.entropy_L[trained] > 0)
    assert trainer.train_step(packed(samples, step=1, version=1)).tokens == []


def test_mismatch_excludes_samples_of_older_versions(one_rank):
    trainer = one_rank()
    samples = with_own_logprobs(trainer, make_samples(LENGTHS, version=3))
    stale = samples[1]
    last = int(np.flatnonzero(stale.trained_L)[-1])
    stale.version_L[last] = 2
    stale.engine_logprob_L = np.where(stale.trained_L, -50.0, 0.0)
    metrics = trainer.train_step(packed(samples, version=3)).metrics
    total = sum(sample.num_trained for sample in samples)
    assert metrics["mismatch/on_policy_share"] == pytest.approx(1 - stale.num_trained / total)
    assert metrics["mismatch/logprob_difference_max"] < 1e-12
    assert metrics["kl_divergence_inference"] > 1.0
    assert metrics["staleness/token_age_max"] == 1.0
    assert metrics["staleness/token_age_mean"] == pytest.approx(1 / total)


def test_mismatch_is_absent_when_nothing_is_on_policy(one_rank):
    metrics = one_rank().train_step(packed(make_samples(LENGTHS, version=0), version=5)).metrics
    assert "mismatch/logprob_difference_mean" not in metrics
    assert metrics["staleness/token_age_mean"] == 5.0


def test_entropy_and_kl_are_means_over_trained_tokens(one_rank):
    trainer = one_rank()
    samples = make_samples(LENGTHS)
    own = [trainer.backend.sequence_logprobs(sample.token_ids_L.tolist()) for sample in samples]
    delta = np.concatenate(
        [(np.array([0.0, *o]) - s.engine_logprob_L)[s.trained_L] for o, s in zip(own, samples, strict=True)]
    )
    delta = delta.clip(-20, 20)
    metrics = trainer.train_step(packed(samples)).metrics
    assert metrics["kl_divergence_inference"] == pytest.approx(float((np.exp(delta) - 1 - delta).mean()), rel=1e-9)
    assert metrics["mismatch/logprob_difference_p95"] == pytest.approx(np.quantile(abs(delta), 0.95), rel=0.1)
    assert 0.0 < metrics["entropy"] < np.log(VOCAB)


def test_masked_samples_change_neither_weights_nor_metrics(one_rank):
    def trained(extra: list[TrainSample]):
        samples = [*make_samples(LENGTHS), *extra]
        compute_advantages(samples)
        trainer = one_rank()
        metrics = trainer.train_step(packed(samples)).metrics
        return weights(trainer), {k: v for k, v in metrics.items() if not k.startswith("timing")}

    masked = make_samples([40, 50], seed=9)
    for sample in masked:
        sample.trained_L[:] = False
    plain_weights, plain_metrics = trained([])
    found_weights, found_metrics = trained(masked)
    assert relative_error(found_weights, plain_weights) == 0.0
    assert found_metrics == plain_metrics


def test_a_step_with_nothing_to_train_leaves_the_weights(one_rank):
    trainer = one_rank()
    before = weights(trainer)
    metrics = trainer.train_step(StepInput(step=0, version=0, minibatches=[])).metrics
    assert relative_error(weights(trainer), before) == 0.0
    assert metrics["tokens/trained"] == 0.0
    assert metrics["grad_norm"] == 0.0


def test_minibatches_are_optimizer_steps_at_one_learning_rate(one_rank):
    trainer = one_rank(warmup_steps=4)
    metrics = trainer.train_step(packed(make_samples(LENGTHS), num_minibatches=2)).metrics
    assert metrics["optimizer_steps"] == 2.0
    assert metrics["learning_rate"] == pytest.approx(0.01 / 4)


def test_the_time_of_a_weight_sync_is_reported_by_the_next_step_only(one_rank):
    trainer = one_rank()
    assert list(trainer.named_weights())
    steps = [trainer.train_step(packed(make_samples(LENGTHS), step=step)) for step in range(2)]
    assert [step.metrics["timing_weight_sync_trainer_total"] > 0 for step in steps] == [True, False]
    assert [sum(span.name == "weight_sync" for span in step.spans) for step in steps] == [1, 0]


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(one_rank):
    trainer = one_rank()
    before = weights(trainer)
    samples = make_samples(LENGTHS)
    samples[0].advantage = float("inf")
    with pytest.raises(FloatingPointError, match="gradient of training step 7 is not finite"):
        trainer.train_step(packed(samples, step=7))
    assert relative_error(weights(trainer), before) == 0.0


def test_logprobs_that_are_not_finite_stop_the_run_with_the_same_message(one_rank):
    trainer = one_rank()
    with torch.no_grad():
        trainer.backend.policy.head.weight.to_local()[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="mixed_precision_dtype is None"):
        trainer.train_step(packed(make_samples(LENGTHS), step=7))


def test_a_gradient_clip_of_0_clips_nothing(one_rank):
    trained = []
    for bound in (0.0, 1e9):
        trainer = one_rank(grad_clip=bound)
        before = weights(trainer)
        trainer.train_step(packed(make_samples(LENGTHS)))
        trained.append(weights(trainer))
        assert relative_error(trained[-1], before) > 0
    assert relative_error(*trained) == 0


def test_rewarded_tokens_become_likelier(one_rank):
    trainer = one_rank("tied", model_dtype="float32", learning_rate=3e-3)

    def two_answers() -> list[TrainSample]:
        """The same prompt answered by 7 (rewarded) and by 8, in one group."""
        samples = make_samples([4, 4], group_size=2)
        for sample, answer, reward in zip(samples, (7, 8), (1.0, 0.0), strict=True):
            sample.token_ids_L = np.array([3, 1, 4, answer])
            sample.trained_L = np.array([False, False, False, True])
            sample.reward = reward
        compute_advantages(samples)
        return samples

    before = trainer.backend.sequence_logprobs([3, 1, 4, 7])[-1] - trainer.backend.sequence_logprobs([3, 1, 4, 8])[-1]
    for step in range(10):
        trainer.train_step(packed(two_answers(), step=step, version=step))
    after = trainer.backend.sequence_logprobs([3, 1, 4, 7])[-1] - trainer.backend.sequence_logprobs([3, 1, 4, 8])[-1]
    assert after > before + 1.0


@pytest.mark.parametrize("model_dtype", ["float32", "bfloat16"])
def test_mixed_precision_keeps_logprobs_close_to_float32(one_rank, model_dtype):
    tokens = make_samples([60])[0].token_ids_L.tolist()
    exact = np.array(one_rank("untied", model_dtype="float32").backend.sequence_logprobs(tokens))
    trainer = one_rank("untied", model_dtype=model_dtype, mixed_precision_dtype="bfloat16")
    difference_N = abs(np.array(trainer.backend.sequence_logprobs(tokens)) - exact)
    assert difference_N.mean() < 0.05
    assert np.quantile(difference_N, 0.99) < 0.2
    result = trainer.train_step(packed(make_samples(LENGTHS)))
    assert np.isfinite(result.metrics["grad_norm"])
    assert {meta.dtype for meta in trainer.backend.weight_metadata()} == {model_dtype}


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}])
def test_weights_in_half_precision_compute_in_the_dtype_of_mixed_precision(one_rank, changes):
    tokens = make_samples([60])[0].token_ids_L.tolist()
    rounded = one_rank("untied", model_dtype="float32")
    for parameter in rounded.backend.parameters:
        local = sharding.local_tensor(parameter.detach())
        local.copy_(local.bfloat16())
    exact = rounded.backend.sequence_logprobs(tokens)
    trainer = one_rank("untied", model_dtype="bfloat16", mixed_precision_dtype="float32", **changes)
    assert trainer.backend.sequence_logprobs(tokens) == pytest.approx(exact, abs=1e-5)
    result = trainer.train_step(packed(make_samples(LENGTHS)))
    assert result.metrics["grad_norm"] > 0


def test_half_precision_does_not_lose_small_gradients(one_rank):
    """Divided by a million tokens before backward, float16 gradients would be below its smallest number."""
    samples = make_samples(LENGTHS)
    norms = {}
    for dtype in (None, "float16"):
        step_input = packed(samples)
        step_input.minibatches[0].num_trained_tokens = 1_000_000
        trainer = one_rank("untied", model_dtype="float32", mixed_precision_dtype=dtype)
        norms[dtype] = trainer.train_step(step_input).metrics["grad_norm"]
    assert norms["float16"] == pytest.approx(norms[None], rel=0.02)


def test_the_ranks_meet_on_one_address_and_no_other_interface(one_rank):
    one_rank("untied")
    addresses = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert addresses == {"127.0.0.1"}


def test_a_model_that_is_not_there_is_a_user_error(tmp_path):
    trainer = Trainer(make_config(str(tmp_path / "missing")), 0, 1, "127.0.0.1", 0)
    with pytest.raises(UserError, match=r"model: .*missing"):
        trainer.setup()
    trainer.shutdown()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(models, tmp_path, value):
    broken = shutil.copytree(models["untied64"], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.c_fc.weight"][3, 2] = value
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    trainer = Trainer(make_config(str(broken)), 0, 1, "127.0.0.1", 0)
    with pytest.raises(UserError, match=r"infinite in model_dtype float64: model\.layers\.1\.mlp\.c_fc\.weight\. Down"):
        trainer.setup()
    trainer.shutdown()


@pytest.mark.parametrize(
    "base", ["telescope.trainer.backends.fsdp.backend.FSDPBackend", "telescope.trainer.backends.TrainingBackend"]
)
def test_a_custom_backend_adds_its_metrics(one_rank, tmp_path: Path, monkeypatch, base):
    module, _, name = base.rpartition(".")
    (tmp_path / "own_backend.py").write_text(
        f"from {module} import {name}\n"
        f"class Own({name}):\n"
        "    def train_step(self, trainer_data):\n"
        "        metrics = super().train_step(trainer_data)\n"
        "        metrics['custom/data/step'] = float(trainer_data['step'])\n"
        "        return metrics\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    trainer = one_rank(train_backend="own_backend:Own")
    assert trainer.train_step(packed(make_samples(LENGTHS), step=4)).metrics["custom/data/step"] == 4.0
    sys.modules.pop("own_backend")


def test_metrics_of_a_custom_backend_become_numbers(one_rank, monkeypatch, caplog):
    trainer = one_rank()
    own = {"tensor": torch.tensor(1.5), "numpy": np.float32(2), "flag": True}
    own |= {"text": "x", "none": None, "vector": torch.ones(2)}
    monkeypatch.setattr(trainer.backend, "train_step", lambda trainer_data: own)
    for step in range(2):
        metrics = trainer.train_step(packed(make_samples(LENGTHS), step=step)).metrics
        found = {name: value for name, value in metrics.items() if not name.startswith("timing_")}
        assert found == {"tensor": 1.5, "numpy": 2.0, "flag": 1.0}
        assert all(type(value) is float for value in found.values())
    assert [name for name in own if f"for {name}, which is left out" in caplog.text] == ["text", "none", "vector"]
    assert len(caplog.records) == 3
    monkeypatch.setattr(trainer.backend, "train_step", lambda trainer_data: None)
    with pytest.raises(TypeError, match="train_step of FSDPBackend returned None, no dict of metrics"):
        trainer.train_step(packed(make_samples(LENGTHS)))


@pytest.mark.parametrize(("name", "words"), [
    ("nothing", "is unknown"),
    ("no_such_package.x:Y", "cannot be imported.*no_such_package.*PYTHONPATH"),
    ("json:JSONDecodr", r"has no JSONDecodr.*Did you mean 'JSONDecoder'\?"),
    ("json:JSONDecoder", "not a subclass of telescope.trainer.backends.TrainingBackend"),
])  # fmt: skip
def test_an_unknown_backend_names_the_field_and_the_fix(name, words):
    with pytest.raises(ConfigError, match=f"train_backend.*{words}"):
        find_backend(name)


def test_cuda_without_a_gpu_names_the_field(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 0).type == "cpu"
    with pytest.raises(ConfigError, match="device: 'cuda'"):
        choose_device("cuda", 0)


def test_what_is_sent_to_engines_is_cast_before_it_is_gathered(one_rank, monkeypatch):
    gathered = []
    whole = sharding.full_tensor
    monkeypatch.setattr(sharding, "full_tensor", lambda tensor: gathered.append(tensor.dtype) or whole(tensor))
    trainer = one_rank("tied", model_dtype="float32")
    sent = {tensor.dtype for _, tensor in trainer.named_weights(torch.bfloat16)}
    assert set(gathered) == sent == {torch.bfloat16}


def test_every_field_that_these_tests_set_is_one_of_the_configuration():
    derived = {"hash", "precisions", "compute_dtype"}
    assert set(vars(make_config("a/model"))) - derived <= set(TelescopeConfig.model_fields)


@pytest.fixture
def full_collections(monkeypatch):
    monkeypatch.setattr(worker, "freeze_heap", freeze_heap)
    monkeypatch.setattr(worker, "unfreeze_heap", unfreeze_heap)
    yield
    gc.freeze()  # as before: tests/conftest.py


@pytest.mark.usefixtures("full_collections")
def test_a_collection_of_cycles_between_steps_visits_few_objects_of_a_rank(one_rank):
    trainer = one_rank("untied", model_dtype="float32")
    for step in range(2):
        trainer.train_step(packed(make_samples(LENGTHS), step=step))
    visited, left_out = len(gc.get_objects()), gc.get_freeze_count()
    assert visited < 0.1 * left_out
    trainer.shutdown()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("full_collections")
def test_a_restart_removes_the_earlier_model(one_rank):
    trainer = one_rank("untied", model_dtype="float32")
    before = weakref.ref(trainer.backend.policy)
    trainer.restart()
    assert before() is None
    assert gc.get_freeze_count() > 0
