"""The error budget: what counts as a failed sample, when it ends a run, and the message."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.orchestrator.fakes import config_of
from tests.unit.orchestrator.simulation import InMemoryRun

from telescope.errors import EnvironmentFailure, RunError
from telescope.orchestrator.budget import MIN_FAILURES, WINDOW, ErrorBudget
from telescope.utils.text import LONGEST

EVENTS = {
    "sample": lambda budget: budget.succeeded("samples", "bad"),
    "failure": lambda budget: budget.failed("samples", "bad", 7, "boom"),
    "prompt": lambda budget: budget.succeeded("prompts", "bad"),
}


def fate(events: list[str], max_share: float) -> tuple[int, str] | None:
    """The number of samples after which the run ended, and its message; None if it continued."""
    budget = ErrorBudget(max_share)
    num_samples = 0
    for event in events:
        num_samples += event != "prompt"
        try:
            EVENTS[event](budget)
        except RunError as error:
            return num_samples, str(error)
    return None


@given(
    st.lists(st.sampled_from(["sample", "failure", "prompt", "prompt"]), max_size=200),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
def test_prompts_in_between_change_nothing(events, max_share):
    assert fate(events, max_share) == fate([event for event in events if event != "prompt"], max_share)


@given(st.integers(0, 400), st.integers(1, 100), st.sampled_from([0.2, 0.5, 1.0]))
def test_a_run_ends_exactly_when_more_than_the_share_of_its_samples_failed(num_good, num_bad, max_share):
    def is_over(bad: int) -> bool:
        return bad >= MIN_FAILURES and bad > max_share * (num_good + bad)

    end = fate(["sample"] * num_good + ["failure"] * num_bad, max_share)
    first = next((bad for bad in range(1, num_bad + 1) if is_over(bad)), None)
    if first is None:
        assert end is None
    else:
        assert end[0] == num_good + first
        assert f"'bad' failed {first} of its last {num_good + first} samples" in end[1]


def test_only_the_newest_samples_count():
    few = ["failure"] * (MIN_FAILURES - 1)
    assert fate([*few, *["sample"] * WINDOW, *few], 0.001) is None
    end = fate(["sample"] * 10 * WINDOW + ["failure"] * 200, 0.2)
    assert f"failed 103 of its last {WINDOW} samples" in end[1]
    assert "103 x boom" in end[1]


def test_a_budget_of_zero_ends_at_the_first_failure():
    end = fate(["sample"] * 100 + ["failure"], 0.0)
    assert "failed 1 of its last 101 samples, more than environment_error_budget = 0." in end[1]


def test_failed_prompts_are_a_share_of_the_prompts():
    budget = ErrorBudget(0.5)
    for item in range(200):  # before any sample, every third fails
        if item % 3:
            budget.succeeded("prompts", "bad")
        else:
            budget.failed("prompts", "bad", item, "no such item")
    budget.failed("samples", "bad", 1, "boom")
    mostly = ErrorBudget(0.5)
    mostly.succeeded("prompts", "bad")
    for item in range(MIN_FAILURES - 1):
        mostly.failed("prompts", "bad", item, "no such item")
    with pytest.raises(RunError, match=f"failed {MIN_FAILURES} of its last {MIN_FAILURES + 1} prompts"):
        mostly.failed("prompts", "bad", 100, "no such item")


def test_each_environment_has_its_own_budget():
    budget = ErrorBudget(0.2)
    for item in range(MIN_FAILURES - 1):
        budget.failed("samples", "one", item, "boom")
        budget.failed("samples", "two", item, "boom")
    with pytest.raises(RunError, match="'two'"):
        budget.failed("samples", "two", 0, "boom")


def test_each_cause_is_reported_once_with_an_example_item():
    budget = ErrorBudget(0.2)
    broken = "compute_reward failed: ValueError: my reward is broken (environment.py:19)"
    with pytest.raises(RunError) as caught:  # noqa: PT012
        for item in range(6):
            budget.failed("samples", "bad", item, f"environment 'bad', item {item}: {broken}")
        for item in range(5):
            where = "compute_reward did not end within 2 seconds; its stack is in /run/rollout-0.log"
            budget.failed("samples", "bad", item, f"environment 'bad', item {item}, rollout '{item}/0.1': {where}")
        for item in range(5):
            budget.failed(
                "samples", "bad", item, f"environment 'bad', item {item}: it exited:\nmore\nSegmentation fault"
            )
    reported = str(caught.value).partition("Most common: ")[2]
    assert reported.startswith(
        f"6 x {broken}, last with item 5; 5 x compute_reward did not end within 2 seconds; its stack is in "
        "/run/rollout-0.log, last with item 4; 5 x it exited: ... Segmentation fault, last with item 4. Fix"
    )


@pytest.mark.parametrize(
    ("cause", "common"),
    [("it has {} tokens", r"16 like it has 15 tokens, last with item 15\. Fix"),
     ("a bad <Foo at 0x7f{}0>", r"16 like a bad <Foo at 0x7f150>, last with item 15\. Fix"),
     ("it ended with exit code {}", r"1 x it ended with exit code 0, last with item 0; 1 x"),
     ("Error code: {} - no", r"1 x Error code: 0 - no, last with item 0; 1 x")],
)  # fmt: skip
def test_causes_that_differ_in_a_size_are_alike_but_not_in_a_code(cause, common):
    budget = ErrorBudget(0.2)
    with pytest.raises(RunError, match=f"Most common: {common}"):  # noqa: PT012
        for item in range(16):
            budget.failed("samples", "bad", item, f"environment 'bad', item {item}: {cause.format(item)}")


def test_reported_messages_are_short_and_without_control_sequences():
    budget = ErrorBudget(0.0)
    with pytest.raises(RunError) as caught:
        budget.failed(
            "samples", "bad", 3, f"\x1b[31mValueError\x1b[0m: {'x' * 5000}\n\nmore\n\x1b[1mthe end\x1b[0m\n \n"
        )
    reported = str(caught.value).partition("Most common: ")[2]
    assert re.match(r"1 x ValueError: x+… \.\.\. the end, last with item 3\.", reported)
    assert len(reported) < 2 * LONGEST


@pytest.mark.parametrize("group_size", [2, 8])
async def test_an_environment_that_always_fails_has_failed_all_its_samples(group_size):
    run = InMemoryRun(config_of(group_size=group_size, prompt_prefetch_buffer_size=64))

    async def broken(key: str, index: int, *arguments: object, **options: object) -> None:
        raise EnvironmentFailure(f"environment '{key}', item {index}: compute_reward failed: ValueError: broken")

    run.environment.advance = broken
    with pytest.raises(RunError) as caught:
        await run.run()
    assert "'arithmetic' failed 16 of its last 16 samples" in str(caught.value)
    assert "Most common: 16 x compute_reward failed: ValueError: broken, last with item " in str(caught.value)
    assert len(run.environment.prepared) > MIN_FAILURES // group_size, "prompts were rendered in vain"
