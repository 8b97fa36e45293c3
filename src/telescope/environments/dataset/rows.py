"""Recognizes the columns of rows that were written for other trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from telescope.errors import UserError
from telescope.utils.text import did_you_mean

PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input")
ANSWERS = (
    "reward_model.ground_truth",
    "answer",
    "ground_truth",
    "final_answer",
    "expected_answer",
    "solution",
    "target",
)
COLUMN_ROWS = 100
"""Rows whose columns are listed; a file of JSON lines may lack some in some rows."""


def value_of(row: dict[str, Any], column: str) -> Any:
    """Returns the value of a column, or of a field in it, as in `reward_model.ground_truth`. None if there is none."""
    value: Any = row
    if column in row:
        return row[column]
    for name in column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def list_columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the columns of the first rows, in order."""
    return list(dict.fromkeys(column for row in rows[:COLUMN_ROWS] for column in row))


def choose_columns(
    path: str,
    rows: Sequence[dict[str, Any]],
    columns: list[str],
    prompt: str | None,
    answer: str | None,
    *,
    needs_answer: bool,
) -> tuple[str, str, str | None]:
    """Returns what the rows look like, and the columns of the prompt and the answer.

    Raises `UserError` with the columns that exist.
    """
    it_has = f"It has: {', '.join(columns) or 'no rows'}."

    def has(column: str) -> bool:
        return any(value_of(row, column) is not None for row in rows[:COLUMN_ROWS])

    for name, column in (("prompt", prompt), ("answer", answer)):
        if column is not None and not has(column):
            raise UserError(
                f"dataset: {path} has no column {column!r} ({name}).{did_you_mean(column, columns)} {it_has}"
            )
    chosen = prompt or next(filter(has, PROMPTS), None)
    if chosen is None:
        raise UserError(f"dataset: {path} has no prompt ({', '.join(PROMPTS)}). {it_has} Set prompt to a column.")
    gold = answer or next(filter(has, ANSWERS), None)
    if gold is None and needs_answer:
        raise UserError(
            f"dataset: {path} has no answer ({', '.join(ANSWERS)}). {it_has} Set answer to a column, or reward to a "
            "function."
        )
    if prompt or answer:
        return "rows of these columns", chosen, gold
    if gold == "reward_model.ground_truth":
        return "rows of verl", chosen, gold
    if (chosen, gold) == ("question", "answer") and "####" in str(value_of(rows[0], "answer")):
        return "rows of GSM8K", chosen, gold
    return "rows of TRL" if chosen == "prompt" else "questions with answers" if gold else "prompts", chosen, gold
