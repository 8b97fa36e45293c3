"""The names under which published evals look up others."""

from telescope.evals.base import get_eval, list_evals

__all__ = ["get_eval", "list_evals"]
