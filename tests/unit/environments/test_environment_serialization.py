"""Identities and serialized scores."""

from dataclasses import replace

import numpy as np
import pytest

from telescope.environments.base import EvalMetricsResult, RewardResult, Sample
from telescope.environments.serialization import (
    LARGEST_NUMBER,
    check_verdict,
    sample_uid,
    serialize_messages,
    serialize_score,
    serialize_tool_records,
)
from telescope.environments.user_code import describe_error, needs_stack
from telescope.errors import MalformedResultError


def test_identity_of_a_sample_is_its_content():
    sample = Sample([{"role": "user", "content": "q"}], "a", {"x": 1, "y": [2]})
    assert sample_uid(sample) == sample_uid(Sample([{"content": "q", "role": "user"}], "a", {"y": [2], "x": 1}))
    changes = ({"answer": "b"}, {"metadata": {"x": 2, "y": [2]}}, {"prompt": "q"})
    others = [replace(sample, **change) for change in changes]
    assert len({sample_uid(s) for s in (sample, *others)}) == 4


def test_scores_become_json_values():
    notes = [{"path": {1, 2}.__class__, "text": "y\udfff"}, {"a": float("nan"), "b": float("-inf")}]
    tags, golds = {"level": 4}, {"answer": "x\ud800", "none": None}
    result = RewardResult(np.float32(0.5), {"correct": True, "steps": np.int64(3)}, golds, notes, tags)
    assert serialize_score(result, for_eval=False) == {
        "total_reward": 0.5, "sample_metrics": {"correct": 1.0, "steps": 3.0}, "sample_tags": {"level": "4"},
        "golden_answers": {"answer": "x?", "none": None},
        "info_turns": [{"path": "<class 'set'>", "text": "y?"}, {"a": "NaN", "b": "-Infinity"}],
    }  # fmt: skip


@pytest.mark.filterwarnings("error")
def test_the_largest_scores_have_finite_statistics():
    ends = [serialize_score(RewardResult(sign * LARGEST_NUMBER), for_eval=False)["total_reward"] for sign in (1, -1)]
    rewards_n = np.array(ends * 8)
    deviations_n = (rewards_n - rewards_n.mean()).astype(np.float32)
    assert np.isfinite([rewards_n.mean(), rewards_n.std(ddof=1), *deviations_n, deviations_n.sum()]).all()
    assert np.isfinite(np.abs(deviations_n).sum() * np.float32(1_000_000))  # over the tokens of a batch


@pytest.mark.parametrize(("result", "words"), [
    (None, "returned NoneType None, not a RewardResult"),
    (EvalMetricsResult(), "not a RewardResult"),
    (RewardResult("1"), "total_reward is str '1'"),
    (RewardResult(None), "total_reward is NoneType None"),
    (RewardResult(float("nan")), "total_reward is nan, not a finite number"),
    (RewardResult(1.0, {"a": float("inf")}), r"sample_metrics\['a'\] is inf"),
    (RewardResult(1.0, sample_tags=[]), "sample_tags is list"),
    (RewardResult(1.0, info_turns=[{(1, 2): 3}]), "info_turns cannot be written as JSON"),
    (RewardResult(1.0, info_turns=None), "info_turns is NoneType None, not a list"),
    (RewardResult(10**400), "not a number"),
    (RewardResult(1e308), r"total_reward is 1e\+308, which is out of range: at most \+-1e\+30"),
    (RewardResult(1.0, {"a": -1e300}), r"sample_metrics\['a'\] is -1e\+300, which is out of range"),
])  # fmt: skip
def test_malformed_scores_are_refused_by_name_and_value(result, words):
    with pytest.raises(MalformedResultError, match=words):
        serialize_score(result, for_eval=False)


def test_a_coroutine_is_shown_with_the_fix_and_without_its_address():
    async def score():
        return 1.0

    with pytest.raises(MalformedResultError, match=r"total_reward is the coroutine \S+score \(await it") as raised:
        serialize_score(RewardResult(score()), for_eval=False)
    assert describe_error(raised.value) == f"MalformedResultError: {raised.value}", "a line of ours is named"
    assert not needs_stack(raised.value)


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(("content", "text"), [
    ("x", "x"), (5, "5"), (np.float64(0.5), "0.5"), (["a", {"type": "text", "text": "b"}], "a\nb"), ("\ud800", "?"),
])  # fmt: skip
def test_message_content_becomes_text_which_a_message_of_calls_does_not_need(content, text):
    messages = [{"role": "user", "content": content}, CALL]
    assert serialize_messages(messages, "env_response") == [{"role": "user", "content": text}, CALL]


@pytest.mark.parametrize("content", [None, b"x", object(), {"board": [1]}, [], [{"type": "image", "image": "x"}]])
def test_an_observation_that_is_no_text_is_refused(content):
    with pytest.raises(MalformedResultError, match="env_response returned a message of 'user' whose content is "):
        serialize_messages([{"role": "user", "content": content}], "env_response")


def test_a_verdict_is_a_bool_with_an_optional_reason():
    for verdict in (True, (True, None), [True, "won"], np.True_, (np.bool_(True), "won")):
        assert check_verdict(verdict)[0] is True
    for no_verdict in (1, None, "yes", (1, "won"), (True, "a", "b")):
        with pytest.raises(MalformedResultError, match="is_done returned"):
            check_verdict(no_verdict)


def test_records_of_tool_calls_become_texts_whatever_an_environment_added():
    rows = serialize_tool_records(
        [{"name": "a\ud800", "arguments": {"x": 1}, "seconds": 2, "sandbox": "s1", "mine": 1}, {}]
    )
    assert rows == [
        {"name": "a?", "arguments": "{'x': 1}", "result": None, "error": None, "sandbox": "s1", "seconds": 2.0},
        {"name": None, "arguments": None, "result": None, "error": None, "sandbox": None, "seconds": None},
    ]
    for wrong in ("text", ["text"], [{"seconds": "soon"}]):
        with pytest.raises(MalformedResultError, match="tool"):
            serialize_tool_records(wrong)
