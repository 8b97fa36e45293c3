"""Evals: what is measured and not trained on.

`base` holds the class to subclass, `registry` finds evals by name. Who runs them, and when, is the orchestrator's
matter: an eval is played through the same path as training.
"""

from telescope.evals.base import Eval
from telescope.evals.registry import check_eval, eval_spec, get_eval, list_evals

__all__ = ["Eval", "check_eval", "eval_spec", "get_eval", "list_evals"]
