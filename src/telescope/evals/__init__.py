"""Evals: benchmarks that are measured and not trained on.

`base` has the class to subclass and finds evals by name, `runner` runs them through the same path as training.
The orchestrator decides when.
"""

from telescope.evals.base import Eval, check_eval, eval_spec, get_eval, list_evals

resolve = get_eval
"""The published name of `get_eval`."""

__all__ = ["Eval", "check_eval", "eval_spec", "get_eval", "list_evals", "resolve"]
