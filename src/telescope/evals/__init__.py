"""Evals: benchmarks that are measured and not trained on.

`base` has the class to subclass, `registry` finds evals by name, `runner` runs them through the same path as training.
The orchestrator decides when.
"""

from telescope.evals.base import Eval
from telescope.evals.registry import check_eval, eval_spec, get_eval, list_evals

__all__ = ["Eval", "check_eval", "eval_spec", "get_eval", "list_evals"]
