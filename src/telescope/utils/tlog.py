"""Loggers for environments and evals."""

import logging


def get_logger(name: str) -> logging.Logger:
    """Returns a logger whose messages go to the run's log."""
    return logging.getLogger(name if name.split(".")[0] == "telescope" else f"telescope.{name}")
