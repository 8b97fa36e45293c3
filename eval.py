"""Measures checkpoints: `uv run eval.py --config configs/evals/eval.yaml`. The same as `telescope eval`."""

import sys

from telescope.cli.main import command

if __name__ == "__main__":
    command(["eval", *sys.argv[1:]])
