"""Advantages of a training batch: masks, groups of one, equal rewards, any order.

That they are those of the papers is shown in `tests/reference`.
"""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.algorithms import compute_advantages, get_algorithm


@dataclass
class Scored:
    group_id: int
    reward: float
    advantage: float = -99.0
    num_trained: int = 5


def advantages(rewards_by_group: list[list[float]], **options: str) -> list[float]:
    samples = [Scored(group, reward) for group, rewards in enumerate(rewards_by_group) for reward in rewards]
    return list(compute_advantages(samples, **options))


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("rewards", [[[0.1] * 7, [1 / 3] * 3], [[1.0, 1.0], [3.0, 3.0]], []])
def test_equal_rewards_give_exactly_zero_even_where_their_mean_is_rounded(rewards, norm):
    assert advantages(rewards, advantage_norm=norm) == [0.0] * sum(map(len, rewards))


def test_a_group_of_one_keeps_its_reward():
    assert advantages([[0.7], [0.0], [2.0, 2.0]]) == [0.7, 0.0, 0.0, 0.0]


def test_masked_samples_are_in_no_statistic_and_get_zero():
    samples = [Scored(0, 0.0), Scored(0, 1.0), Scored(0, 50.0, num_trained=0), Scored(0, float("nan"))]
    found = compute_advantages(samples)
    assert found[:2] == pytest.approx(advantages([[0.0, 1.0]]))
    assert list(found[2:]) == [0.0, 0.0]


rewards = st.floats(-5, 5, allow_nan=False).map(lambda value: round(value, 3))
groups = st.lists(st.lists(rewards, min_size=1, max_size=6), min_size=1, max_size=5)


@given(groups, st.sampled_from(["group", "batch"]), st.randoms())
def test_advantages_do_not_depend_on_the_order_of_samples(rewards_by_group, norm, random):
    samples = [Scored(group, reward) for group, found in enumerate(rewards_by_group) for reward in found]
    straight = compute_advantages(samples, advantage_norm=norm)
    order = list(range(len(samples)))
    random.shuffle(order)
    shuffled = compute_advantages([samples[i] for i in order], advantage_norm=norm)
    assert shuffled == pytest.approx(straight[order], abs=1e-9)


def test_an_unknown_algorithm_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'ppo' is unknown: use one of grpo"):
        get_algorithm("ppo")


def test_the_driver_can_import_algorithms_and_packing_without_torch():
    code = "import sys; import telescope.algorithms, telescope.trainer.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_equal_rewards_give_nothing_under_batch_norm_beside_a_group_of_one() -> None:
    found = advantages([[1.0, 1.0, 1.0], [1.0], [0.0, 1.0]], algorithm="reinforce_pp", advantage_norm="batch")
    assert found[:3] == [0.0, 0.0, 0.0]
    assert found[4] < 0 < found[3]
