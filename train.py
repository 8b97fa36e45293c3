"""Trains a model: `uv run train.py --config configs/examples/example_countdown.yaml`. The same as `telescope train`."""

import sys

from telescope.cli.main import main
from telescope.utils.process import run_and_exit

if __name__ == "__main__":
    run_and_exit(lambda: main(["train", *sys.argv[1:]]))
