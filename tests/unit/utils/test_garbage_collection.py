"""The cycle collector is quiet during a run and as it was afterwards."""

import gc
import weakref

import pytest

from telescope.utils.process import THRESHOLDS, freeze_heap, rare_full_collections, unfreeze_heap

LONGEST_PAUSE_CONTAINERS = 6_000
"""What a collection may visit when all that is young is alive, at about 1 us each: 6 ms."""


def test_young_collections_visit_few_containers() -> None:
    visited: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] < 2:
            visited.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

    alive: list[list[int]] = []
    with rare_full_collections():
        gc.callbacks.append(count)
        try:
            alive.extend([] for _ in range(10 * THRESHOLDS[0]))
        finally:
            gc.callbacks.remove(count)
    assert len(visited) >= 9
    assert max(visited) <= LONGEST_PAUSE_CONTAINERS


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


class InACycle:
    def __init__(self) -> None:
        self.itself = self


def test_excluded_garbage_is_freed_by_the_next_call() -> None:
    alive = InACycle()
    seen = weakref.ref(alive)
    try:
        freeze_heap()
        del alive
        gc.collect()
        assert seen() is not None
        freeze_heap()
        assert seen() is None
    finally:
        unfreeze_heap()
        assert gc.get_freeze_count() == 0
