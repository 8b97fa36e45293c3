"""Measures checkpoints: `uv run eval.py --config configs/evals/eval.yaml`. The same as `telescope eval`."""

import sys

from telescope.cli.main import main
from telescope.utils.process import run_and_exit

if __name__ == "__main__":
    run_and_exit(lambda: main(["eval", *sys.argv[1:]]))
