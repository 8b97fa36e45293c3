"""Trains a model: `uv run train.py --config configs/examples/example_countdown.yaml`. The same as `telescope train`."""

import sys

from telescope.cli.main import exit_with, main

if __name__ == "__main__":
    exit_with(lambda: main(["train", *sys.argv[1:]]))
