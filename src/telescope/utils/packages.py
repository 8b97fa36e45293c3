"""Finds out whether optional packages are installed, without importing them."""

import importlib.metadata
import importlib.util


def is_installed(name: str) -> bool:
    """Returns whether a package can be imported. A folder of that name without modules, such as W&B's, is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its parent package is missing
        return False
    return spec is not None and spec.origin is not None


def installed_version(name: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
