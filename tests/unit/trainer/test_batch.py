"""Which ranks get the same rows, and what is refused of a backend's layout."""

import dataclasses

import pytest

from telescope.errors import ConfigError
from telescope.trainer.batch import Layout, check_layouts


def test_neighbors_get_the_same_rows_and_one_of_them_reports():
    layouts = [Layout.of_neighbors(rank, 6, 2) for rank in range(6)]
    check_layouts(layouts)
    assert [layout.data_rank for layout in layouts] == [0, 0, 1, 1, 2, 2]
    assert {layout.data_size for layout in layouts} == {3}
    assert [layout.reports for layout in layouts] == [True, False] * 3


@pytest.mark.parametrize(("rank", "change", "words"), [
    (1, {"data_size": 3}, "data_size differs"),
    (3, {"data_rank": 2}, "data_rank is not in"),
    (2, {"reports": False}, "one rank must report"),
    (1, {"reports": True}, "one rank must report"),
    (0, {"sends_weights": False}, "rank 0 does not send"),
])  # fmt: skip
def test_a_layout_that_would_lose_rows_or_weights_is_refused(rank, change, words):
    layouts = [Layout.of_neighbors(rank, 4, 2) for rank in range(4)]
    layouts[rank] = dataclasses.replace(layouts[rank], **change)
    with pytest.raises(ConfigError, match=words):
        check_layouts(layouts)
