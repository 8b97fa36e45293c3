"""Runs `python -m telescope` as the command `telescope`."""

from telescope.cli.main import command

if __name__ == "__main__":
    command()
