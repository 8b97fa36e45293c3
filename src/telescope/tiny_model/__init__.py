"""The tiny model: a locally built Qwen2 that barely solves Countdown.

It has about a million parameters. With it the whole system runs, and visibly learns, on a machine without GPU, account
or network. A training run sees an ordinary Hugging Face model folder and uses nothing of this package.

`ensure_tiny_model` is the entry point. Importing this package loads neither torch nor transformers.
"""

from telescope.tiny_model.cache import TinyModelSettings, ensure_tiny_model

__all__ = ["TinyModelSettings", "ensure_tiny_model"]
