"""Modules of this repository that no package holds, for tests of them: the benchmarks and the scripts.

Invariant: what is imported here is gone at the end, so that a later test imports it anew and none finds it by accident.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = ROOT / "scripts"


@contextmanager
def benchmarks_importable() -> Iterator[None]:
    """Modules of `benchmarks/` can be imported by their bare names, as when one of them is run as a program."""
    with _imports_undone():
        sys.path.insert(0, str(BENCHMARKS))
        yield


@contextmanager
def load_script(name: str) -> Iterator[ModuleType]:
    """The module of `scripts/<name>.py`, run anew."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _imports_undone():
        assert name not in sys.modules, f"{name} is loaded already, and would be gone at the end"
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


@contextmanager
def _imports_undone() -> Iterator[None]:
    """At the end `sys.path` is as it was, and `sys.modules` has no more of these folders than before."""
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in sys.modules.keys() - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).parent in (BENCHMARKS, SCRIPTS):
                del sys.modules[name]
