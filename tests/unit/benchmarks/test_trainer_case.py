"""The trainer benchmark: its counts, and a rank that exits early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from telescope.config.model_shape import known_shape


@pytest.fixture
def trainer_case() -> Any:
    import trainer_case

    return trainer_case


@pytest.mark.parametrize("name", ["0.6b", "4b", "8b", "14b", "32b"])
def test_flops_are_six_per_parameter_and_token_plus_causal_attention(trainer_case, name):
    shape = known_shape(f"qwen3-{name}")
    assert shape is not None
    table = shape.vocab_size * shape.hidden_size
    in_products = shape.num_parameters if shape.tied_embeddings else shape.num_parameters - table
    found = trainer_case.model_flops(trainer_case.SHAPES[name], [1000, 24])
    attention = 6 * shape.num_layers * shape.num_heads * shape.head_dim * (1000**2 + 24**2)
    assert found == pytest.approx(6 * in_products * 1024 + attention, rel=1e-12)
    without_gradients = trainer_case.model_flops(trainer_case.SHAPES[name], [1000, 24], frozen=True)
    assert without_gradients == pytest.approx(4 * in_products * 1024 + attention, rel=1e-12)


def test_a_step_is_normalized_by_the_tokens_of_all_ranks(trainer_case):
    case = trainer_case.Case("tiny", 2048, "packed", "selective", ranks=4, micro_batches=3)
    rows = [trainer_case.make_row(case, index) for index in range(3)]
    (minibatch,) = trainer_case.make_step(case, rows, 0).minibatches
    assert len(minibatch.micro_batches) == 3
    assert minibatch.num_trained_tokens == 12 * (2048 - len(case.lengths))
    assert sum(case.lengths) == 2048
    assert case.tokens_per_step == 12 * 2048


def test_a_rank_that_does_not_fit_ends_the_case_at_once(trainer_case, monkeypatch, tmp_path):
    class Process:
        """The second rank has no memory left; the first waits for it."""

        sentinel = 0

        def __init__(self, target: Any, args: tuple[Any, ...]) -> None:
            self.exitcode = trainer_case.OUT_OF_MEMORY if args[0] == 1 else None

        def start(self) -> None:
            pass

        def is_alive(self) -> bool:
            return self.exitcode is None

        def kill(self) -> None:
            self.exitcode = -9

        def join(self) -> None:
            pass

    context = SimpleNamespace(Process=Process)
    monkeypatch.setattr(trainer_case.multiprocessing, "get_context", lambda _: context)
    case = trainer_case.Case("tiny", 512, "single", "selective", ranks=2)
    assert trainer_case.run_on_ranks(case, "cpu", 1.0, tmp_path, 60.0) == {"out_of_memory": True}
