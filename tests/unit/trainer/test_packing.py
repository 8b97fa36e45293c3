"""Packing: nothing lost, nothing twice, every rank as long as the others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.trainer.batch import StepInput, TrainSample
from telescope.trainer.packing import assign_bins, lay_out, pack_step, packing_stats, split_groups, truncate_to


def make_sample(name: int, length: int, group: int = 0, trained: bool = True) -> TrainSample:
    trained_L = np.zeros(length, dtype=bool)
    if trained:
        trained_L[length // 2 or 1 :] = True
    return TrainSample(
        sample_id=f"s{name}", group_id=group, environment="countdown", token_ids_L=np.arange(length) + 1000 * name,
        trained_L=trained_L, engine_logprob_L=np.where(trained_L, -0.25 * np.arange(length), 0.0),
        version_L=np.where(trained_L, name % 3, -1), reward=0.0, advantage=name + 0.5,
    )  # fmt: skip


def rows_of(inputs: list[StepInput]):
    return [row for each in inputs for minibatch in each.minibatches for row in minibatch.micro_batches]


lengths_strategy = st.lists(st.integers(2, 64), min_size=1, max_size=40)


@given(lengths_strategy, st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 8, 64]))
def test_every_trained_token_is_in_one_micro_batch_of_one_rank(lengths, num_ranks, num_minibatches, multiple):
    samples = [make_sample(i, length, group=i // 4) for i, length in enumerate(lengths)]
    inputs = pack_step(
        samples, step=0, version=1, seq_len=64, num_ranks=num_ranks,
        pad_to_multiple_of=multiple, num_minibatches=num_minibatches,
    )  # fmt: skip
    found = sorted(
        (int(token), round(float(logprob), 6), float(advantage), int(version))
        for row in rows_of(inputs)
        for token, logprob, advantage, version, trained in zip(
            row.token_ids_T, row.engine_logprob_T, row.advantage_T, row.version_T, row.trained_T, strict=True
        )
        if trained
    )
    wanted = sorted(
        (int(s.token_ids_L[t]), round(float(s.engine_logprob_L[t]), 6), s.advantage, int(s.version_L[t]))
        for s in samples
        for t in np.flatnonzero(s.trained_L)
    )
    assert found == wanted


@given(lengths_strategy, st.integers(1, 4))
def test_samples_that_do_not_share_a_row_fill_no_more_than_a_row_when_padded(lengths, num_ranks):
    samples = [make_sample(i, length) for i, length in enumerate(lengths)]
    rows = rows_of(pack_step(samples, step=0, version=1, seq_len=64, num_ranks=num_ranks, packs=False))
    for row in rows:
        segments = np.diff(row.cu_seqlens)
        assert len(segments) * segments.max() <= 64
    assert sorted(name for row in rows for name in row.sample_ids) == sorted(sample.sample_id for sample in samples)


@given(lengths_strategy, st.integers(1, 4), st.integers(1, 3))
def test_ranks_have_equal_micro_batch_counts_and_global_denominators(lengths, num_ranks, num_minibatches):
    samples = [make_sample(i, length, group=i // 4) for i, length in enumerate(lengths)]
    inputs = pack_step(samples, step=3, version=2, seq_len=64, num_ranks=num_ranks, num_minibatches=num_minibatches)
    assert len(inputs) == num_ranks
    for parts in zip(*(each.minibatches for each in inputs), strict=True):
        assert len({len(part.micro_batches) for part in parts}) == 1
        assert len({(part.num_trained_tokens, part.num_samples) for part in parts}) == 1
        assert parts[0].num_trained_tokens == sum(int(r.trained_T.sum()) for p in parts for r in p.micro_batches)
        assert parts[0].num_samples == sum(len(r.sample_ids) for p in parts for r in p.micro_batches)


@given(lengths_strategy, st.integers(1, 4))
def test_dummies_appear_only_when_samples_are_fewer_than_micro_batches(lengths, num_ranks):
    bins = assign_bins(lengths, 64, num_ranks)
    assert len(bins) % num_ranks == 0
    assert sorted(i for row in bins for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 64 for row in bins)
    num_empty = sum(not row for row in bins)
    assert num_empty == max(0, len(bins) - len(lengths))


@given(lengths_strategy, st.integers(1, 4))
def test_rows_are_as_few_as_first_fit_needs_rounded_up_to_the_ranks(lengths, num_ranks):
    # First-fit decreasing never needs more than 11/9 of the least number of bins, plus one.
    least = -(-sum(lengths) // 64)
    bins = assign_bins(lengths, 64, num_ranks)
    assert len(bins) <= -(-(least * 11 // 9 + 2) // num_ranks) * num_ranks


def test_a_typical_batch_is_even_between_ranks_and_has_no_dummy():
    rng = np.random.default_rng(0)
    samples = [make_sample(i, int(n), group=i // 8) for i, n in enumerate(rng.lognormal(6.5, 0.6, 128).clip(2, 4096))]
    stats = packing_stats(pack_step(samples, step=0, version=0, seq_len=4096, num_ranks=4, pad_to_multiple_of=64))
    assert stats["packing/dummy_share"] == 0.0
    assert stats["packing/padding_share"] < 0.02
    assert stats["packing/imbalance"] < 1.05


def test_three_full_rows_on_two_ranks_cost_one_small_dummy():
    samples = [make_sample(i, 64, group=i) for i in range(3)]
    inputs = pack_step(samples, step=0, version=0, seq_len=64, num_ranks=2, pad_to_multiple_of=8)
    dummies = [row for row in rows_of(inputs) if not row.sample_ids]
    assert [len(row.token_ids_T) for row in dummies] == [8]
    assert not dummies[0].trained_T.any()
    assert packing_stats(inputs)["packing/dummy_share"] == pytest.approx(8 / 200)


def test_positions_restart_and_padding_is_a_segment_of_its_own_where_there_is_some():
    row = lay_out([make_sample(0, 3), make_sample(1, 4)], pad_to_multiple_of=8)
    assert row.cu_seqlens.tolist() == [0, 3, 7, 8]
    assert row.position_ids_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert row.sample_index_T.tolist() == [0, 0, 0, 1, 1, 1, 1, -1]
    assert row.version_T.tolist() == [-1, 0, 0, -1, -1, 1, 1, -1]
    assert row.trained_T.tolist() == [False, True, True, False, False, True, True, False]
    assert lay_out([make_sample(0, 8)], pad_to_multiple_of=8).cu_seqlens.tolist() == [0, 8]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 6))
def test_groups_stay_whole_over_optimizer_steps(sizes, num_minibatches):
    samples = [make_sample(g * 10 + i, 4, group=g) for g, size in enumerate(sizes) for i in range(size)]
    parts = split_groups(samples, num_minibatches)
    assert len(parts) == min(num_minibatches, len(sizes))
    seen = [{sample.group_id for sample in part} for part in parts]
    assert sum(len(groups) for groups in seen) == len(set().union(*seen)) == len(sizes)


def test_samples_without_trained_tokens_are_neither_computed_nor_counted():
    untrained = make_sample(1, 8, trained=False)
    (step_input,) = pack_step([make_sample(0, 8), untrained], step=0, version=0, seq_len=64, num_ranks=1)
    assert step_input.minibatches[0].num_samples == 1
    assert [row.sample_ids for row in rows_of([step_input])] == [["s0"]]
    inputs = pack_step([untrained], step=0, version=0, seq_len=64, num_ranks=2)
    assert [each.minibatches for each in inputs] == [[], []], "no optimizer step"


def test_a_sample_longer_than_seq_len_or_with_a_trained_first_token_is_refused():
    long, short = make_sample(0, 65), make_sample(0, 4)
    short.trained_L[0] = True
    words = r"s0 has 65 tokens, more than seq_len = 64: raise seq_len or lower max_model"
    for sample, message in ((long, words), (short, "first token")):
        with pytest.raises(ValueError, match=message):
            pack_step([sample], step=0, version=0, seq_len=64, num_ranks=1)


def test_truncation_counts_the_trained_tokens_it_drops():
    kept, lost = truncate_to([make_sample(0, 10), make_sample(1, 4)], seq_len=7)
    assert [sample.length for sample in kept] == [7, 4]
    assert lost == 3


def test_routes_follow_their_tokens_through_packing_and_truncation() -> None:
    one, other = make_sample(0, 5), make_sample(1, 3)
    one.routes_LXK = np.arange(5 * 2 * 2, dtype=np.uint8).reshape(5, 2, 2)
    row = lay_out([other, one], pad_to_multiple_of=4)
    assert row.routes_TXK.shape == (8, 2, 2)
    np.testing.assert_array_equal(row.routes_TXK[3:], one.routes_LXK)
    assert not row.routes_TXK[:3].any()
    assert lay_out([other]).routes_TXK is None
    (short,), _ = truncate_to([one], 4)
    np.testing.assert_array_equal(short.routes_LXK, one.routes_LXK[:4])
