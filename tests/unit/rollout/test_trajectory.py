"""A trajectory is token ids: added and sampled tokens of each turn, with their versions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.rollout.fakes import generation, reward

from telescope.rollout.trajectory import Trajectory, Turn

tokens = st.lists(st.integers(0, 2**17), max_size=6)


def trajectory(turns: list[tuple[list[int], list[int]]]) -> Trajectory:
    sample = Trajectory("5-0", 5, 0, "arithmetic")
    sample.turns = [
        Turn(added, generation(sampled), parent=index - 1 if index else None)
        for index, (added, sampled) in enumerate(turns)
    ]
    return sample


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=4))
def test_the_training_sequence_is_all_that_was_added_and_sampled_in_order(turns):
    sample = trajectory(turns)
    sample.reward = reward()
    (train,) = sample.sequences()
    assert train.token_ids_L.tolist() == [token for pair in turns for part in pair for token in part]
    assert train.num_trained == sample.totals.num_completion_tokens == sum(len(sampled) for _, sampled in turns)
    assert train.token_ids_L[train.trained_L].tolist() == [token for _, sampled in turns for token in sampled]


def test_only_sampled_tokens_are_trained_and_each_keeps_its_logprob_and_version():
    sample = Trajectory("5-0", 5, 0, "arithmetic", reward=reward(0.25))
    sample.turns = [
        Turn([1, 2], generation([10, 11, 12], spans=[(4, 0, 1), (5, 1, 3)])),
        Turn([3], generation([13], version=6), parent=0),
    ]
    (train,) = sample.sequences()
    assert train.token_ids_L.tolist() == [1, 2, 10, 11, 12, 3, 13]
    assert train.trained_L.tolist() == [False, False, True, True, True, False, True]
    assert train.version_L.tolist() == [-1, -1, 4, 5, 5, -1, 6]
    np.testing.assert_array_equal(train.engine_logprob_L, np.array([0, 0, -0.5, -0.5, -0.5, 0, -0.5], np.float32))
    assert (train.token_ids_L.dtype, train.version_L.dtype) == (np.int32, np.int32)


def test_age_counts_from_the_oldest_sampled_token_of_any_turn():
    sample = trajectory([])
    assert sample.totals.version_range == (-1, -1)
    sample.turns = [
        Turn([1], generation([2, 3], spans=[(4, 0, 1), (5, 1, 2)])),
        Turn([6], generation([7], version=9), parent=0),
    ]
    assert sample.totals.version_range == (4, 9)


def test_prompt_tokens_are_those_of_the_first_prompt_and_the_stop_reason_that_of_the_last_turn():
    sample = trajectory([([1, 2, 3], [4]), ([5, 6], [7, 8])])
    sample.turns[1].generation.finish_reason = "length"
    totals = sample.totals
    assert (totals.num_prompt_tokens, totals.num_completion_tokens, sample.stop_reason) == (3, 3, "length")
    assert (trajectory([]).totals.num_prompt_tokens, trajectory([]).stop_reason) == (0, "")


def test_the_prompt_of_another_conversation_is_new_and_one_that_is_rendered_again_is_not():
    sample = trajectory([([1, 2, 3], [4])])
    sample.turns += [
        Turn([1, 2], generation([5, 6]), chat="scout"),
        Turn([1, 2, 3, 4, 7], generation([8]), renders_again=True),
        Turn([1, 2, 5, 6, 9, 9], generation([8]), chat="scout", renders_again=True),
        Turn([1, 5, 5], generation([8])),
    ]
    assert sample.totals.num_environment_tokens == 2 + 1 + 2 + 3


def test_answers_that_are_not_trained_do_not_decide_how_the_sample_ended_or_how_long_it_was():
    sample = trajectory([([1], [2, 3])])
    sample.turns[0].text = "The answer is 4."
    verdict = Turn([1], generation([4] * 9, finish_reason="length"), text="yes " * 9, chat="judge", trained=False)
    sample.turns.append(verdict)
    assert (sample.stop_reason, sample.totals.longest_answer, sample.totals.num_completion_tokens) == ("stop", 2, 11)
    assert sample.completion_text == "The answer is 4."
    sample.turns = [verdict]
    assert (sample.stop_reason, sample.totals.longest_answer) == ("length", 9)


def test_each_token_keeps_the_routes_under_which_its_successor_was_sampled():
    sample = trajectory([([1, 2], [10, 11]), ([3], [12, 13])])

    def routes(*numbers: int) -> np.ndarray:
        return np.array(numbers, np.uint8)[:, None, None] + np.arange(2, dtype=np.uint8)

    first, second = (turn.generation for turn in sample.turns)
    first.routes_MXK = routes(1, 2, 3)  # of tokens 1, 2 and 10
    second.routes_MXK = routes(51, 52, 53, 4, 5, 6)  # of 1, 2, 10 again, 11, 3 and 12
    (train,) = sample.sequences()
    assert train.routes_LXK[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 0]
    second.routes_MXK = routes(5, 6)  # only of the newest tokens
    (train,) = sample.sequences()
    assert train.routes_LXK[:, 0, 0].tolist() == [1, 2, 3, 0, 5, 6, 0]


def test_an_answer_without_routes_leaves_its_tokens_without_them():
    sample = trajectory([([1, 2], [10, 11]), ([3], [12])])
    assert sample.sequences()[0].routes_LXK is None
    sample.turns[0].generation.routes_MXK = np.ones((3, 1, 2), np.uint8)
    (train,) = sample.sequences()
    assert train.routes_LXK[:, 0, 0].tolist() == [1, 1, 1, 0, 0, 0]
