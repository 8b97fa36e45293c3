"""Telescope: reinforcement learning for language models that reason and act.

Importing this package imports nothing heavy. `telescope.config`, `telescope.environments` and `telescope.record.reader`
work without torch, Ray or vLLM installed.
"""

__version__ = "0.1.0"
