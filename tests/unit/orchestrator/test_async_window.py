"""The async window and the ledger of prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.orchestrator.async_window import AsyncWindow, Ledger


def test_zero_async_rollout_is_strictly_synchronous() -> None:
    window = AsyncWindow(batch_size=4, max_async_rollout=0)
    for _ in range(4):
        window.opened()
    assert not window.may_open(), "the next batch must wait for the weights of this one"
    window.version += 1
    assert window.may_open()


def test_a_discarded_group_is_replaced_at_once() -> None:
    window = AsyncWindow(batch_size=2, max_async_rollout=0)
    window.opened()
    window.opened()
    window.discarded()
    assert window.may_open()


@given(
    batch=st.integers(1, 8),
    ahead=st.integers(0, 4),
    actions=st.lists(st.sampled_from(["open", "discard", "step"]), max_size=200),
)
def test_generation_is_never_further_ahead_than_the_window(batch: int, ahead: int, actions: list[str]) -> None:
    window = AsyncWindow(batch, ahead)
    open_groups, discarded, opened = 0, 0, 0
    for action in actions:
        if action == "open" and window.may_open():
            window.opened()
            open_groups, opened = open_groups + 1, opened + 1
        elif action == "discard" and open_groups:
            window.discarded()
            open_groups, discarded = open_groups - 1, discarded + 1
        elif action == "step" and open_groups >= batch:
            open_groups -= batch
            window.version += 1
        assert opened - discarded <= (window.version + 1 + ahead) * batch
        assert open_groups <= (1 + ahead) * batch, "no surplus"


def test_opening_outside_the_window_is_a_bug() -> None:
    window = AsyncWindow(1, 0)
    window.opened()
    with pytest.raises(AssertionError):
        window.opened()


@given(st.lists(st.sampled_from(["open", "train", "drop"]), max_size=100))
def test_every_prompt_is_accounted_for(actions: list[str]) -> None:
    ledger, n = Ledger(), 0
    for action in actions:
        if action == "open":
            ledger.opened(n)
            n += 1
        elif action == "train" and ledger.open:
            ledger.trained(min(ledger.open))
        elif action == "drop" and ledger.open:
            ledger.drop(max(ledger.open), "zero_advantage")
        assert ledger.is_balanced()
    assert ledger.num_opened == n


def test_a_prompt_cannot_end_twice() -> None:
    ledger = Ledger()
    ledger.opened(3)
    ledger.trained(3)
    with pytest.raises(KeyError):
        ledger.drop(3, "zero_advantage")
