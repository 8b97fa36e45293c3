"""The remarks of these tests do not depend on the CPU that they run on."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def unknown_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("telescope.config.remarks.cpu_flags", frozenset)
        yield
