"""Trains a model: `uv run train.py --config configs/examples/example_countdown.yaml`. The same as `telescope train`."""

import sys

from telescope.cli.main import command

if __name__ == "__main__":
    command(["train", *sys.argv[1:]])
