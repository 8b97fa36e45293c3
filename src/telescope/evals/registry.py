"""Import path through which published evals look up other evals."""

from telescope.evals.base import get_eval, list_evals

__all__ = ["get_eval", "list_evals"]
