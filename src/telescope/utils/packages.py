"""Whether optional packages are installed, without importing them."""

from __future__ import annotations

import importlib.util


def is_installed(name: str) -> bool:
    """Returns whether a package can be imported. Not a folder of that name without modules, such as W&B's own."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
