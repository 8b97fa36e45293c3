"""Settings of the tiny model: refused values, and the cache key."""

from dataclasses import fields, replace

import pytest

from telescope.errors import UserError
from telescope.tiny_model.build import learning_rate_at
from telescope.tiny_model.cache import TinyModelSettings


@pytest.mark.parametrize(("field", "value"), [
    ("hidden_size", 100), ("hidden_size", 0), ("num_heads", 8), ("num_kv_heads", 3), ("num_layers", 0),
    ("vocab_size", 100), ("max_position_embeddings", 8), ("num_numbers", 1), ("max_number", 0), ("num_turns", 0),
    ("warm_start_steps", -1), ("warm_start_batch_size", 0), ("warm_start_learning_rate", 0.0), ("wrong_share", 1.5),
    ("clean_share", -0.1), ("seed", 2**63),
])  # fmt: skip
def test_an_impossible_setting_is_refused_by_name_and_value(field, value):
    with pytest.raises(UserError, match=rf"{'hidden_size' if field == 'num_heads' else field} is .*; "):
        TinyModelSettings(**{field: value})


def test_the_key_depends_on_every_setting():
    base = TinyModelSettings()
    other = {
        "tied": True, "hidden_size": 256, "num_kv_heads": 1, "num_heads": 2, "wrong_share": 0.5, "clean_share": 0.5,
        "warm_start_learning_rate": 1e-3, "task": "calculator_agent",
    }  # fmt: skip
    keys = {base.key}
    for field in fields(TinyModelSettings):
        changed = other[field.name] if field.name in other else getattr(base, field.name) + 1
        keys.add(replace(base, **{field.name: changed}).key)
    assert len(keys) == len(fields(TinyModelSettings)) + 1
    assert TinyModelSettings().key == base.key


def test_the_command_explains_every_setting():
    assert all(field.metadata["help"] for field in fields(TinyModelSettings))


def test_the_learning_rate_rises_then_falls_and_is_never_zero():
    rates = [learning_rate_at(step, 200, 1e-3) for step in range(200)]
    assert min(rates) > 0
    assert max(rates) == pytest.approx(1e-3)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 1e-4
    assert learning_rate_at(0, 1, 1e-3) == 1e-3
