"""Reads the YAML tables that modules keep beside them."""

from pathlib import Path
from typing import Any

import yaml


def table_of(file: str) -> Any:
    """Returns the content of the YAML file beside a module, given the module's `__file__`."""
    # Uses libyaml if available, because every command imports such modules.
    return yaml.load(Path(file).with_suffix(".yaml").read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
