"""Benchmarks and scripts are imported for one test, and are as unknown after it as before."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import is_dataclass

import pytest
from tests.repository_modules import benchmarks_importable, load_script


def test_benchmarks_are_imported_by_bare_names_and_removed_after_any_test() -> None:
    before = list(sys.path)
    with pytest.raises(KeyError), benchmarks_importable():  # noqa: PT012
        import demo_runs  # which imports another

        assert "measure" in sys.modules
        raise KeyError(demo_runs.__name__)
    assert sys.path == before
    assert not {"demo_runs", "measure"} & set(sys.modules)
    assert importlib.util.find_spec("demo_runs") is None


def test_a_script_is_a_module_whose_dataclasses_work_and_gone_afterwards() -> None:
    with load_script("gpu_suite") as suite:
        assert sys.modules["gpu_suite"] is suite
        assert is_dataclass(suite.Part)
    assert "gpu_suite" not in sys.modules
