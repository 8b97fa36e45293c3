"""Converts checkpoints to Hugging Face models. The same as `telescope convert`, whose `--help` explains it."""

import sys

from telescope.cli.main import main
from telescope.utils.process import run_and_exit

if __name__ == "__main__":
    run_and_exit(lambda: main(["convert", *sys.argv[1:]]))
