"""Whether optional packages are installed, without importing them."""

from __future__ import annotations

import importlib.util


def is_installed(name: str) -> bool:
    """Returns whether a package can be imported. Not a folder of that name without modules, such as W&B's own."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the package that it would be in
        return False
    return spec is not None and spec.origin is not None
