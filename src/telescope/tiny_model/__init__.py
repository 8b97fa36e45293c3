"""The tiny model: a Qwen2 of about a million parameters that is made on the spot and can just about play Countdown.

It lets the whole system run, and visibly learn, on a machine without a GPU, an account or a network. Nothing here is
used by a training run itself: a run sees an ordinary model directory in Hugging Face form.

`ensure_tiny_model` is what other rooms call; importing this package loads neither torch nor transformers.
"""

from telescope.tiny_model.cache import ensure_tiny_model
from telescope.tiny_model.settings import TinyModelSettings

__all__ = ["TinyModelSettings", "ensure_tiny_model"]
