"""The build backend of pyproject.toml: setuptools, once scripts/build_dashboard.py has built or found the pages.

Whatever installs the project calls it (`pip install .`, `uv sync`, `python -m build`). Without pages it goes on, since
training needs none, and `telescope ui` says how to get them.
"""

import sys
from collections.abc import Callable
from typing import Any

import build_dashboard  # beside this file, which is in `backend-path`
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def with_pages(hook: Callable[..., str]) -> Callable[..., str]:
    def build(*arguments: Any, **options: Any) -> str:
        try:
            done = build_dashboard.build()
        except build_dashboard.BuildError as error:
            done = str(error)
        if done:
            print(f"dashboard: {done}", file=sys.stderr)
        return hook(*arguments, **options)

    return build


build_wheel, build_sdist, build_editable = map(
    with_pages, (build_meta.build_wheel, build_meta.build_sdist, build_meta.build_editable)
)
