"""Recognizes the columns and prompts of rows that were written for other trainers."""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from telescope.environments.records import ChatMessage
from telescope.errors import UserError
from telescope.utils.text import did_you_mean

PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input", "messages", "conversations", "text")
IMAGES = ("images", "image")
CHOICES = ("choices", "options")
LETTERS = tuple("ABCDEFGHIJ")
"""Columns that hold one choice each, as in a spreadsheet."""
ANSWERS = (
    "reward_model.ground_truth", "answer", "ground_truth", "final_answer", "expected_answer", "solution", "target",
    "output", "answerKey", "canonical_solution", "code",
)  # fmt: skip
TESTS = ("tests", "info", "input_output", "reward_model.ground_truth", "ground_truth", "test_list", "test")
ASSERTIONS = {"test": "rows of HumanEval", "test_list": "rows of MBPP"}
GSM8K = "rows of GSM8K"
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def read_row(
    row: dict[str, Any], columns: Sequence[str], answer: str | None
) -> tuple[str | list[ChatMessage], Any, bool]:
    """Returns a row's prompt, its gold, and whether none of the row's choices is the gold.

    Several columns of a prompt are joined with blank lines. If prompt and answer are one column, a conversation, its
    last message is the gold. Choices get letters, and a gold that is the letter, the position or the text of a choice
    becomes its letter and its text. Raises `ValueError`.
    """
    gold = None if answer is None else value_of(row, answer)
    if columns == [answer]:
        conversation = _read_messages(gold)
        if not isinstance(conversation, list) or conversation[-1:] == [] or conversation[-1]["role"] != "assistant":
            raise ValueError("it does not end with an assistant's message, the answer. Set answer to a column")
        return _answerable(conversation[:-1]), conversation[-1]["content"], False
    if any(row.get(column) for column in IMAGES) and any("<image>" in str(value_of(row, name)) for name in columns):
        raise ValueError("its prompt shows an image, which no model sees here. Leave such rows out")
    if len(columns) == 1:
        return read_prompt(value_of(row, columns[0])), gold, False
    texts: list[str] = []
    lacks_choice = False
    lettered = [column for column in columns if column in LETTERS]
    for column in columns:
        if column in lettered[1:]:
            continue
        value = {name: row.get(name) for name in lettered} if column in lettered else value_of(row, column)
        choices = _read_choices(value)
        if shown := {letter: text for letter, text in choices.items() if text}:
            if not all(text in "".join(texts) for text in shown.values()):
                texts.append("\n".join(f"{letter}. {text}" for letter, text in shown.items()))
            letter = _choice_of(gold, choices)
            if column in (*CHOICES, *lettered):
                lacks_choice = letter not in shown and not isinstance(gold, list)
            gold = [letter, shown[letter]] if letter in shown else gold
        elif column in (*CHOICES, *lettered) and not isinstance(value, str):
            continue  # an open question among others with choices
        elif isinstance(text := read_prompt(value), str):
            texts.append(text)
        else:
            raise ValueError(f"messages in {column!r} cannot be joined with other columns. Set prompt to one column")
    return "\n\n".join(filter(None, texts)), gold, lacks_choice


def _choice_of(gold: Any, choices: Mapping[str, str]) -> str | None:
    """Returns the letter of the choice that a gold names by its letter, its text or its position."""
    named, texts = str(gold), list(filter(None, choices.values()))
    position = gold if isinstance(gold, int | float) else -1
    texts_of_bool = [text for text in texts if text.casefold() == named.casefold()]
    if isinstance(gold, bool) and texts_of_bool:  # the text of a choice, not its position
        named, position = texts_of_bool[0], -1
    if named.isdecimal() and named not in texts:  # HellaSwag writes it as text
        position = int(named)
    if 0 <= position < len(choices) and named not in choices:
        return list(choices)[int(position)]
    return next((letter for letter, text in choices.items() if text and named in (letter, text)), None)


def _read_choices(value: Any) -> dict[str, str]:
    """Returns the choices in a list, an object of letters and texts, or ARC's `{text: [...], label: [...]}`.

    Choices that a row does not have are empty, because a position counts them too.
    """
    if isinstance(value, dict) and isinstance(value.get("text"), list) and isinstance(value.get("label"), list):
        value = dict(zip(value["label"], value["text"], strict=False))
    elif isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        value = dict(zip(string.ascii_uppercase, value, strict=False))
    if not isinstance(value, dict) or {"role", "from"} & value.keys():
        return {}
    return {str(letter): "" if text is None else str(text) for letter, text in value.items()}


def read_prompt(value: Any) -> str | list[ChatMessage]:
    """Returns a prompt as text or as messages, the last of which the model answers. Empty if there is none.

    Messages may also be written as text (JSON, or a Python literal), as one object, or in the form of ShareGPT. Raises
    `ValueError`, whose text has the problem and the fix, for messages that no model can answer.
    """
    return _answerable(_read_messages(value))


def _read_messages(value: Any) -> str | list[ChatMessage]:
    value = value.decode() if isinstance(value, bytes) else value
    if isinstance(value, str):
        value = _written_messages(value.strip()) or value
    if not isinstance(value, list | dict):
        return "" if value is None or not str(value).strip() else str(value)
    return [_read_message(message) for message in (value if isinstance(value, list) else [value])]


def _answerable(messages: str | list[ChatMessage]) -> str | list[ChatMessage]:
    if isinstance(messages, list) and messages and messages[-1]["role"] not in ("user", "tool"):
        raise ValueError(
            f"its last message is of the role {messages[-1]['role']!r}. End it with the user's message, and keep the "
            "answer in a column of its own"
        )
    return messages


def _written_messages(text: str) -> list[Any] | dict[str, Any] | None:
    """Returns the messages in a text that consists of messages, as in an exported CSV file. None for other texts."""
    if text[:1] + text[-1:] not in ("[]", "{}") or not re.search(r"['\"](role|from)['\"]\s*:", text):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        items = value if isinstance(value, list) else [value]
        are_messages = all(
            isinstance(i, dict) and (i.get("role") in ROLES or {"from", "value"} <= i.keys()) for i in items
        )
        return value if are_messages else None
    raise ValueError(
        f"{text[:60]!r} looks like messages, but is neither JSON nor a list of Python. Export it as JSON lines"
    )


def _read_message(message: Any) -> ChatMessage:
    fix = 'Write {"role": "user", "content": "..."}'
    if isinstance(message, dict) and {"from", "value"} <= message.keys() and "role" not in message:
        role = message["from"]
        message = {"role": SHAREGPT_ROLES.get(role, role), "content": message["value"]}
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"{str(message)[:60]!r} is no message with a role of {', '.join(ROLES)}. {fix}")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
        message = message | {"content": content}
    if not isinstance(content, str) and not (message["role"] == "assistant" and message.get("tool_calls")):
        raise ValueError(f"the content of a message is {str(content)[:60]!r}, not text. {fix}")
    return message


def read_criteria(value: Any) -> dict[str, float]:
    """Returns criteria with their weights. Raises `ValueError` for a value of another form.

    The value is a text, an object of weights, or a list of texts or of objects with `criterion` (or `description`) and
    `weight` (or `points`). Any of it may be JSON.
    """
    if isinstance(value, str):
        value = json.loads(value) if value[:1] in ("{", "[") else [value]
    if isinstance(value, dict):
        # Parquet has null for the criteria of other rows.
        value = [{"criterion": text, "weight": weight} for text, weight in value.items() if weight is not None]
    found: dict[str, float] = {}
    for item in value if isinstance(value, list) else [None]:
        given = {"criterion": item} if isinstance(item, str) else item if isinstance(item, dict) else {}
        text = given.get("criterion") or given.get("description")
        if not text:
            raise ValueError(f"{str(value)[:60]!r} has no criteria. Write a text, or {{criterion: weight}}")
        weights = (given.get("weight"), given.get("points"), 1.0)
        found[str(text)] = float(next(weight for weight in weights if weight is not None))
    if not any(weight > 0 for weight in found.values()):
        raise ValueError(f"no criterion has a weight above 0: {found}")
    return found


def read_assertions(row: dict[str, Any], tests: Any, prompt: Any) -> tuple[list[str], str, str] | None:
    """Returns the tests of a row of HumanEval or MBPP as programs, what precedes the answer, and the prompt.

    The head of a function precedes the answer, which thereby may be its body or all of it. None for other rows.
    """
    if isinstance(tests, str) and "def check(" in tests and (entry := row.get("entry_point")):
        is_head = isinstance(prompt, str) and f"def {entry}(" in prompt
        head = f"{prompt}\n" if is_head else ""
        return [f"{tests}\ncheck({entry})"], head, f"Complete this function:\n\n{prompt}" if is_head else prompt
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        return None
    setup = "\n".join([row.get("test_setup_code") or "", *(row.get("test_imports") or [])])
    shown = f"{prompt}\n\nThe code must pass tests such as: {tests[0]}"
    return [f"{setup}\n{test}" for test in tests], "", shown if isinstance(prompt, str) else prompt


def value_of(row: dict[str, Any], column: str) -> Any:
    """Returns the value of a column, or of a field in it (`reward_model.ground_truth`). None if it is missing."""
    value: Any = row
    if column in row:
        return row[column]
    for name in column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def choose_columns(
    path: str,
    rows: Sequence[dict[str, Any]],
    columns: list[str],
    prompt: str | list[str] | None,
    answer: str | None,
    *,
    needs_answer: bool,
    tests: str | None = None,
    needs_tests: bool = False,
) -> tuple[str, list[str], str | None, str | None]:
    """Returns the recognized format of the rows, and the columns of the prompt, the answer and the tests.

    Raises `UserError` with the existing columns.
    """
    it_has = f"It has: {', '.join(columns) or 'no rows'}."

    def has(column: str) -> bool:
        return any(value_of(row, column) is not None for row in rows)

    named = [prompt] if isinstance(prompt, str) else prompt or []
    for name, column in (*(("prompt", column) for column in named), ("answer", answer), ("tests", tests)):
        if column is not None and not has(column):
            raise UserError(
                f"dataset: {path} has no column {column!r} ({name}).{did_you_mean(column, columns)} {it_has}"
            )
    chosen = named or [*filter(has, PROMPTS)][:1]
    if not chosen:
        raise UserError(f"dataset: {path} has no prompt ({', '.join(PROMPTS)}). {it_has} Set prompt to a column.")
    if not named and isinstance(value_of(rows[0], chosen[0]), str):
        chosen += ["input"] if chosen == ["instruction"] and has("input") else []
        in_one = [c for c in CHOICES if has(c) and any(any(_read_choices(value_of(r, c)).values()) for r in rows)][:1]
        chosen += in_one or ([*filter(has, LETTERS)] if has("A") and has("B") else [])
    gold = answer or next(filter(has, ANSWERS), None)
    if gold is None and needs_answer and chosen[0] in ("messages", "conversations"):
        gold = chosen[0]
    if gold is None and needs_answer:
        raise UserError(
            f"dataset: {path} has no answer ({', '.join(ANSWERS)}). {it_has} Set answer to a column, or reward to a "
            "function."
        )
    tests = (tests or next(filter(has, TESTS), None)) if needs_tests else None
    if needs_tests and tests is None:
        raise UserError(f"dataset: {path} has no tests ({', '.join(TESTS)}). {it_has} Set tests to a column.")
    form = "rows of TRL" if chosen == ["prompt"] else "questions with answers" if gold else "prompts"
    if (chosen, gold) == (["question"], "answer") and "####" in str(value_of(rows[0], "answer")):
        form = GSM8K
    elif prompt or answer:
        form = "rows of these columns"
    elif gold == "reward_model.ground_truth":
        form = "rows of verl"
    elif tests in ASSERTIONS:
        form = ASSERTIONS[tests]
    return form, chosen, gold, tests
