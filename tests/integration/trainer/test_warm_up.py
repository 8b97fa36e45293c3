"""A warm-up compiles all that training steps will run, and leaves no other trace."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.integration.trainer.plain_kernels import use_plain_kernels
from tests.integration.trainer.trainer_cases import make_config, make_samples, run_ranks, weights
from tests.processes import free_port
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from telescope.trainer.attention import choose_kernel
from telescope.trainer.backends.fsdp import sharding
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer

LENGTHS = ([5, 31, 12, 7, 2, 28, 19, 3], [32, 32, 32, 3], [20], [32])
"""Of the samples of each step: rows of many lengths, full ones, and on a second rank dummies."""
SETTINGS: dict[str, Any] = {
    "seq_len": 32, "pad_to_multiple_of": 1, "model_dtype": "float32", "weight_decay": 0.1,
    "gradient_checkpointing": True,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "untied": ({"gradient_checkpointing_layers": 1}, 2),  # of two blocks: the other is compiled by itself
    "experts": ({"mixed_precision_dtype": "bfloat16"}, 1),
}
"""By model: changes of the settings, and the functions that are compiled then."""


def train(trainer: Trainer) -> dict[str, Any]:
    """Some steps: what is left of them, and what was compiled meanwhile."""
    before = counters["stats"]["unique_graphs"]
    metrics = []
    for step, lengths in enumerate(LENGTHS):
        inputs = pack_step(
            make_samples(lengths, seed=step), step=step, version=step, seq_len=32, num_ranks=trainer.world_size
        )
        found = trainer.train_step(inputs[trainer.rank]).metrics
        metrics.append({name: value for name, value in found.items() if not name.startswith("timing_")})
    return {
        "compiled": counters["stats"]["unique_graphs"] - before, "weights": weights(trainer),
        "moments": moments(trainer), "metrics": metrics,
    }  # fmt: skip


def moments(trainer: Trainer) -> list[torch.Tensor]:
    """All that the optimizer remembers."""
    optimizer = trainer.backend.optimizer  # type: ignore[attr-defined]
    found = [value for state in optimizer.state.values() for value in state.values()]
    return [getattr(tensor, "_local_tensor", tensor).clone() for tensor in found]


def random_states() -> tuple[bytes, object, bytes]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()


def both_ways(trainer: Trainer, compile_again: bool = True) -> dict[str, dict[str, Any]]:
    """The steps after a warm-up that compiles everything, then without one, each from the first weights.

    The second way compiles everything again, or has what the first one compiled.
    """
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        use_plain_kernels(patch)
        for way in ("warm", "cold"):
            if way == "warm" or compile_again:
                torch._dynamo.reset()
                counters.clear()
            trainer.restart()
            if way == "warm":
                trainer.warm_up()
                compiled = counters["stats"]["unique_graphs"]
            results[way] = train(trainer)
    return results | {"warm-up": {"compiled": compiled}}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether two trainings ended in the same bits."""
    return (
        found["metrics"] == wanted["metrics"]
        and all(torch.equal(found["weights"][name], tensor) for name, tensor in wanted["weights"].items())
        and len(found["moments"]) == len(wanted["moments"]) > 0
        and all(torch.equal(mine, other) for mine, other in zip(found["moments"], wanted["moments"], strict=True))
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES)
def test_steps_after_a_warm_up_compile_nothing_and_give_the_same_bits(one_rank, model):
    changes, num_functions = CASES[model]
    results = both_ways(one_rank(model, **SETTINGS, **changes))
    assert results["cold"]["compiled"] == num_functions
    assert results["warm"]["compiled"] == 0
    assert same(results["warm"], results["cold"])


def test_on_two_ranks_too_where_one_has_rows_without_a_sample(models, tmp_path):
    config = make_config(models["tied"], **SETTINGS)
    ((one, two),) = run_ranks([(both_ways, config, (False,))], num_ranks=2, folder=tmp_path)
    for rank in (one, two):
        assert rank["warm-up"]["compiled"] == 1
        assert rank["warm"]["compiled"] == 0
        assert same(rank["warm"], rank["cold"])


def test_a_warm_up_traces_a_block_once_and_leaves_weights_gradients_optimizer_and_random_numbers(one_rank, kernels):
    torch._dynamo.reset()
    trainer = one_rank("untied", **SETTINGS)
    backend = trainer.backend
    before, states = weights(trainer), random_states()
    clear_compilation_metrics()
    span = trainer.warm_up()
    found = [metrics for metrics in get_compilation_metrics() if metrics.co_name is not None]
    assert [metrics.restart_reasons for metrics in found] == [set()]
    assert kernels.calls["backward"] == 2  # it was a backward pass through both blocks
    assert random_states() == states
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    assert [name for name, parameter in backend.policy.named_parameters() if parameter.grad is not None] == []
    assert moments(trainer) == []
    assert backend.take_spans() == []
    assert (span.name, span.rank) == ("compile", 0)
    assert span.end > span.start


def test_a_row_as_long_as_the_hidden_size_compiles_nothing(one_rank, kernels):
    torch._dynamo.reset()
    trainer = one_rank("untied", model_dtype="float32", seq_len=16, pad_to_multiple_of=4)
    assert trainer.backend.policy.causal_lm.config.hidden_size == 16
    counters.clear()
    trainer.warm_up()
    for step, lengths in enumerate(([16], [9, 3], [4])):
        (mine,) = pack_step(make_samples(lengths), step=step, version=0, seq_len=16, num_ranks=1)
        trainer.train_step(mine)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_trainer_without_compilation_reports_it(models, kernels):
    def compiles(**changes: Any) -> bool:
        trainer = Trainer(make_config(models["untied"], **changes), 0, 1, "127.0.0.1", free_port())
        try:
            return trainer.setup().compiles
        finally:
            trainer.shutdown()

    assert compiles(model_dtype="float32")
    assert not compiles(model_dtype="float32", compile_blocks=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "choose_kernel", choose_kernel)
        assert not compiles(model_dtype="float32")  # the CPU


def test_memory_for_checkpoints_is_there_from_the_start_and_changes_no_bit_of_training(one_rank, kernels, tmp_path):
    trainer = one_rank("tied", **SETTINGS, compile_blocks=False)
    plain = train(trainer)
    trainer.config.checkpoint_every = 1  # the backend has the same object
    trainer.restart()
    stager = trainer.backend.saver.copies._stager
    allocated = {id(copy) for copy in stager._cached_storage_mapping.values()}
    assert same(train(trainer), plain)
    trainer.save_checkpoint(4, tmp_path / "step_4")
    trainer.finish_checkpoint()
    assert {id(copy) for copy in stager._cached_storage_mapping.values()} == allocated != set()
