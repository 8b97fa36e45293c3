"""Reads the tables that modules have beside them."""

from pathlib import Path
from typing import Any

import yaml


def table_of(file: str) -> Any:
    """Returns what the YAML file beside a module has, whose `__file__` is given."""
    # With libyaml where there is one: every command imports such modules.
    return yaml.load(Path(file).with_suffix(".yaml").read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
