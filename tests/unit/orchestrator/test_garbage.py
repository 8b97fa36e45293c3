"""The cycle collector is quiet during a run and as it was afterwards."""

import gc

import pytest

from telescope.orchestrator.garbage import rare_full_collections


def test_what_exists_at_the_start_is_left_out_and_everything_is_undone() -> None:
    before = gc.get_threshold()
    with rare_full_collections():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[2] > before[2]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_it_is_undone_after_a_failure_too() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), rare_full_collections():
        raise KeyError("a loop failed")
    assert gc.get_threshold() == before
