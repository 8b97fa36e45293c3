"""The async window and the ledger of prompts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.orchestrator.async_window import Ledger, may_open
from telescope.orchestrator.run_state import RunState


def test_zero_async_rollout_is_strictly_synchronous() -> None:
    ledger = Ledger()
    for n in range(4):
        assert may_open(ledger.num_groups, 4, 0)
        ledger.opened(n)
    assert not may_open(ledger.num_groups, 4, 0), "the next batch must wait for the weights of this one"
    for n in range(4):
        ledger.trained(n)
    assert may_open(ledger.num_groups, 4, 0)


def test_a_group_that_is_given_up_is_replaced_at_once() -> None:
    ledger = Ledger()
    for n in (0, 1):
        ledger.opened(n)
    ledger.drop(0, "zero_advantage")
    assert may_open(ledger.num_groups, 2, 0)
    ledger.opened(2)
    assert not may_open(ledger.num_groups, 2, 0)
    ledger.requeued(2)
    assert may_open(ledger.num_groups, 2, 0)


@given(
    batch=st.integers(1, 8),
    ahead=st.integers(0, 4),
    actions=st.lists(st.sampled_from(["open", "discard", "step"]), max_size=200),
)
def test_generation_is_never_further_ahead_than_the_window(batch: int, ahead: int, actions: list[str]) -> None:
    ledger, version, discarded = Ledger(), 0, 0
    for action in actions:
        if action == "open" and may_open(ledger.num_groups, batch, ahead):
            ledger.opened(ledger.num_opened)
        elif action == "discard" and ledger.open:
            ledger.drop(min(ledger.open), "zero_advantage")
            discarded += 1
        elif action == "step" and len(ledger.open) >= batch:
            for n in sorted(ledger.open)[:batch]:
                ledger.trained(n)
            version += 1
        assert ledger.num_opened - discarded <= (version + 1 + ahead) * batch
        assert len(ledger.open) <= (1 + ahead) * batch, "no surplus"


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


@pytest.mark.parametrize("earlier", [False, True])
def test_requeues_survive_a_checkpoint_also_of_a_version_that_wrote_pairs(earlier: bool) -> None:
    ledger = Ledger({4}, num_opened=3, num_trained=1, dropped={"too_slow": 1}, num_requeued=2, requeues={4: 2})
    values = RunState(ledger=ledger).state_dict()
    if earlier:
        values["ledger"]["requeues"] = [[4, 2]]
    assert RunState.load_state_dict(json.loads(json.dumps(values))).ledger == ledger
