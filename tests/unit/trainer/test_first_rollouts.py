"""An engine that computes something else than the trainer is found in the first steps, and rounding is not."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.families import DENSE, VOCABULARY, WINDOW
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from telescope.errors import RunError
from telescope.trainer import first_rollouts
from telescope.trainer.batch import TrainSample
from telescope.trainer.first_rollouts import FirstRollouts, find_difference
from telescope.trainer.loss import prepare
from telescope.trainer.packing import lay_out

CPU = torch.device("cpu")
FAMILY = next(family for family in DENSE if family.name == "gemma3_text")
LENGTHS = (200, 90, 130)


def model_of(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(FAMILY.model_type, **(FAMILY.fields | changes))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


@pytest.fixture(scope="module")
def trainer() -> PreTrainedModel:
    """The right model, with norms and projections that are not symmetric."""
    model = model_of()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.1
    return model


@torch.no_grad()
def swap_heads(model: Any) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight[:64] = torch.cat([weight[32:64], weight[:32]])


@torch.no_grad()
def forget_a_norm(model: Any) -> None:
    model.model.layers[1].pre_feedforward_layernorm.weight.zero_()


@torch.no_grad()
def scale_the_head(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight * 1.05


ERRORS: dict[str, tuple[dict[str, Any], Callable[[Any], None] | None]] = {
    "a window that is one token longer": ({"sliding_window": WINDOW + 1}, None),
    "other rotary positions": (
        {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 50_000.0} for kind in
                             ("sliding_attention", "full_attention")}},
        None,
    ),
    "a scaled head": ({}, scale_the_head),
    "swapped heads": ({}, swap_heads),
    "one layer's norm": ({}, forget_a_norm),
}  # fmt: skip


def compare(
    trainer: PreTrainedModel, engine: PreTrainedModel, monkeypatch: Any, version: int = 4, old: int = 0, **fields: Any
) -> FirstRollouts:
    """Compares samples of which version 3 sampled the first `old` tokens, and version 4 the rest."""
    monkeypatch.setattr(first_rollouts.dist, "all_reduce", lambda tensor: None)
    generator = torch.Generator().manual_seed(2)
    samples, ours = [], []
    for index, length in enumerate(LENGTHS):
        tokens_L = torch.randint(3, VOCABULARY, (length,), generator=generator)
        logprobs = [logprobs_of(model, tokens_L) for model in (trainer, engine)]
        ours.append(logprobs[0])
        samples.append(
            TrainSample(
                sample_id=str(index),
                group_id=0,
                environment="e",
                token_ids_L=tokens_L.numpy(),
                trained_L=np.arange(length) > 0,
                engine_logprob_L=np.append(0.0, logprobs[1].numpy()),
                version_L=np.where(np.arange(length) < old, 3, 4).astype(np.int32),
                reward=0.0,
            )
        )
    config = SimpleNamespace(
        precisions=("float32", "float32"), temperature=1.0, seq_len=256, top_p=None,
        compare_first_steps=3,
        lora_rank=0,
    )  # fmt: skip
    vars(config).update(fields)
    found = FirstRollouts(config, trainer.config.get_text_config(), CPU)
    host = prepare(lay_out(samples), version)
    found.add(host, torch.cat(ours), torch.from_numpy(host.source.engine_logprob_T[host.predicted_N]))
    return found


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, tokens_L: torch.Tensor) -> torch.Tensor:
    logits_LV = model(tokens_L[None], use_cache=False).logits[0, :-1].double()
    return logits_LV.log_softmax(-1).gather(1, tokens_L[1:, None])[:, 0]


@pytest.mark.parametrize("error", ERRORS)
def test_an_engine_with_this_error_stops_the_run(trainer, error, monkeypatch):
    changes, plant = ERRORS[error]
    engine = model_of(**changes)
    engine.load_state_dict(trainer.state_dict())
    if plant is not None:
        plant(engine)
    with pytest.raises(RunError, match=r"compute different logprobs .* compare_first_steps: 0 trains all the same"):
        compare(trainer, engine, monkeypatch).check()


def test_the_message_names_the_boundary_behind_which_the_difference_begins(trainer, monkeypatch):
    engine = model_of(sliding_window=WINDOW + 1)
    engine.load_state_dict(trainer.state_dict())
    with pytest.raises(
        RunError, match=rf"from position {WINDOW} on: .* before it by .*sliding_window is {WINDOW}: set"
    ):
        compare(trainer, engine, monkeypatch).check()


def test_equal_sides_and_tokens_of_other_versions_pass(trainer, monkeypatch):
    compare(trainer, trainer, monkeypatch).check()
    engine = model_of()  # with other weights, which sampled all of it
    compare(trainer, engine, monkeypatch, version=5).check()
    without_tokens = compare(trainer, engine, monkeypatch, version=5, compare_first_steps=1)
    without_tokens.check()
    assert without_tokens._steps_left == 1
    # Keys and values of the old weights remain behind a sample's later tokens.
    compare(trainer, engine, monkeypatch, old=3).check()


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"lora_rank": 4, "lora_dropout": 0.1}, {"compare_first_steps": 0}])
def test_sides_that_are_meant_to_differ_are_not_compared(trainer, monkeypatch, fields):
    compare(trainer, model_of(), monkeypatch, **fields).check()


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(0.0, 0.03)), min_size=1, max_size=12))
def test_rounding_that_differs_by_position_is_no_error_of_bfloat16(places):
    sums = np.array([(count, count * mean) for count, mean in places])
    assert find_difference(np.arange(len(places)), sums, allowed=0.08) is None


@given(st.lists(st.tuples(st.integers(300, 10_000), st.floats(0.0, 0.01)), min_size=1, max_size=8), st.floats(0.06, 9))
def test_a_jump_is_found_where_it_begins(places, jump):
    pairs = [(count, count * mean) for count, mean in places]
    sums = np.array([*pairs, (400, 400 * jump), (500, 500 * jump)])
    found = find_difference(np.arange(len(sums)), sums, allowed=0.08)
    assert found[0] == len(places)


def test_not_a_number_is_a_difference():
    assert find_difference(np.array([0]), np.array([[100.0, np.nan]]), allowed=0.08) is not None
