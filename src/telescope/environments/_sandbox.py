"""Former import path of `telescope.sandbox`."""

from telescope.sandbox import *  # noqa: F403
from telescope.sandbox import __all__ as __all__
from telescope.sandbox import __getattr__ as __getattr__
