"""Scripts of this repository as modules, for tests of them.

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
SCRIPTS = ROOT / "scripts"


@contextmanager
def load_script(name: str) -> Iterator[ModuleType]:
    """The module of `scripts/<name>.py`, run anew."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path, modules = list(sys.path), set(sys.modules)
    assert name not in modules, f"{name} is loaded already, and would be gone at the end"
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = path
        for added in sys.modules.keys() - modules:
            file = getattr(sys.modules[added], "__file__", None)
            if file and Path(file).parent == SCRIPTS:
                del sys.modules[added]
