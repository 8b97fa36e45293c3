"""A training batch: which advantage each token gets, and which step and version it is trained as."""

import numpy as np
import pytest
from tests.unit.orchestrator.fakes import config_of, group
from tests.unit.rollout.fakes import generation

from telescope.orchestrator.groups import Batch, Group, form_batch
from telescope.rollout.trajectory import Turn


def advantages_by_sample(batch: Batch) -> dict[str, float]:
    """The advantage of each sample's trained tokens in the micro-batches, which must be one number."""
    found: dict[str, float] = {}
    for step_input in batch.inputs:
        for row in (row for minibatch in step_input.minibatches for row in minibatch.micro_batches):
            for index, name in enumerate(row.sample_ids):
                values = set(row.advantage_T[row.trained_T & (row.sample_index_T == index)].tolist())
                assert len(values) == 1
                found[name] = values.pop()
    return found


@pytest.mark.parametrize("step", [0, 7])
def test_rewards_are_compared_within_their_group_and_trained_as_the_version_of_the_step(step: int) -> None:
    config = config_of(algorithm="dr_grpo")
    batch = form_batch(config, [group([0.0, 1.0], n=3), group([10.0, 14.0], n=8)], step, num_ranks=2)
    assert batch.advantages.tolist() == [-0.5, 0.5, -2.0, 2.0]
    assert advantages_by_sample(batch) == {"3-0": -0.5, "3-1": 0.5, "8-0": -2.0, "8-1": 2.0}
    assert [(rank.step, rank.version) for rank in batch.inputs] == [(step, step)] * 2


def test_each_sample_gets_the_advantage_of_its_own_reward_in_any_order_of_arrival() -> None:
    made = group([0.0, 1.0, 5.0], n=3)
    made.samples = [made.samples[index] for index in (2, 0, 1)]
    batch = form_batch(config_of(algorithm="dr_grpo", group_size=3), [made], 0, num_ranks=1)
    assert advantages_by_sample(batch) == {"3-0": -2.0, "3-1": -1.0, "3-2": 3.0}


def with_chat(made: Group, *rewards: float, trained: bool = True) -> Group:
    for sample, reward in zip(made.samples, rewards, strict=True):
        sample.turns.append(Turn([50], generation([60, 61]), chat="checker", trained=trained))
        sample.chat_rewards = {"checker": reward}
    return made


def test_a_conversation_with_its_own_reward_is_compared_with_those_of_its_name() -> None:
    made = with_chat(group([0.0, 1.0], n=3), 4.0, 0.0)
    batch = form_batch(config_of(algorithm="dr_grpo"), [made], 0, num_ranks=1)
    assert advantages_by_sample(batch) == {"3-0/0": -0.5, "3-0/1": 2.0, "3-1/0": 0.5, "3-1/1": -2.0}
    assert batch.advantages.tolist() == [-0.5, 0.5], "one number for each rollout"


def test_tokens_without_a_loss_are_neither_compared_nor_counted() -> None:
    """As those of a judge that is the policy."""
    config, plain = config_of(algorithm="dr_grpo"), group([0.0, 1.0], n=3)
    num_trained = form_batch(config, [plain], 0, num_ranks=2).num_trained_tokens
    assert num_trained == sum(sample.totals.num_completion_tokens for sample in plain.samples)
    batch = form_batch(config, [with_chat(group([0.0, 1.0], n=3), 4.0, 0.0, trained=False)], 0, num_ranks=2)
    assert batch.num_trained_tokens == num_trained
    assert set(advantages_by_sample(batch).values()) == {-0.5, 0.5}


def test_equal_rewards_of_rollouts_train_if_those_of_a_conversation_differ() -> None:
    assert group([1.0, 1.0]).why_useless() == ("zero_advantage", "all_positive")
    made = with_chat(group([1.0, 1.0], n=3), 0.0, 1.0)
    assert made.why_useless() is None
    batch = form_batch(config_of(algorithm="dr_grpo"), [made], 0, num_ranks=1)
    assert advantages_by_sample(batch) == {"3-0/0": 0.0, "3-0/1": -0.5, "3-1/0": 0.0, "3-1/1": 0.5}


def test_masked_samples_are_not_packed_and_leave_the_others_advantages_alone() -> None:
    batch = form_batch(config_of(algorithm="dr_grpo", group_size=3), [group([None, 0.0, 1.0], n=3)], 0, num_ranks=1)
    assert advantages_by_sample(batch) == {"3-1": -0.5, "3-2": 0.5}
    assert np.isfinite(batch.advantages).all()


@pytest.mark.parametrize(("record_tokens", "count"), [("none", 0), (0, 0), (2, 2), (3, 3), ("all", 4), (99, 4)])
def test_the_recorded_samples_are_as_many_as_the_config_says(record_tokens: int | str, count: int) -> None:
    config = config_of(record_tokens=record_tokens)
    inputs = form_batch(config, [group([0.0, 1.0]), group([1.0, 0.0], n=6)], 0, num_ranks=2).inputs
    assert [len(rank.recorded) for rank in inputs] == [count, count]
    if count == 2:
        assert {name.split("-")[0] for name in inputs[0].recorded} == {"5", "6"}, "spread over the groups"
