"""Samples longer than a micro-batch: an error, or truncated and counted, as configured."""

import pytest
from tests.unit.orchestrator.fakes import config_of, group

from telescope.orchestrator.groups import form_batch
from telescope.rollout.sample import RolloutSettings

# A prompt of 2 tokens and an answer of 30: 32, of which the first 16 are 14 of the answer.
OVERLONG = {"lengths": (30,)}


def test_by_default_a_sample_that_does_not_fit_is_an_error_that_names_the_fields() -> None:
    with pytest.raises(ValueError, match="32 tokens, more than seq_len = 16: raise seq_len or lower max_model_len"):
        form_batch(config_of(seq_len=16, pad_to_multiple_of=1), [group([0.0, 1.0], **OVERLONG)], 0, num_ranks=1)


def test_truncated_tokens_are_counted_and_not_trained() -> None:
    config = config_of(seq_len=16, pad_to_multiple_of=1, overlong_samples="truncate")
    batch = form_batch(config, [group([0.0, 1.0], **OVERLONG), group([0.0, 1.0], n=6)], 0, num_ranks=1)
    assert batch.packing["packing/truncated_samples"] == 2
    assert batch.packing["packing/truncated_tokens"] == 2 * (30 - 14)
    rows = [row for minibatch in batch.inputs[0].minibatches for row in minibatch.micro_batches]
    assert sum(int(row.trained_T.sum()) for row in rows) == 2 * 14 + 2 * 3
    assert all(len(row.token_ids_T) <= 16 for row in rows)


def test_generation_stops_where_training_does_unless_samples_may_be_cut() -> None:
    fields = {"seq_len": 32, "max_model_len": 64}
    assert RolloutSettings.from_config(config_of(**fields)).sampling.max_context == 32
    assert RolloutSettings.from_config(config_of(**fields, overlong_samples="truncate")).sampling.max_context == 64
