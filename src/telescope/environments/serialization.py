"""Converts results of user code to JSON values for the driver.

Numbers become finite floats, text becomes UTF-8, everything else becomes JSON types. An invalid result raises an error
that names the field.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from typing import Any

import numpy as np

from telescope.environments.judge import USAGE
from telescope.environments.records import ENV_NAME_KEY, ChatMessage, EvalMetricsResult, RewardResult, Sample
from telescope.errors import MalformedResultError

LARGEST_NUMBER = 1e30
"""Largest reward or metric. Its square is finite in float64; advantages and their sum over a batch are finite in
float32."""


def serialize_score(result: Any, for_eval: bool, method: str | None = None) -> dict[str, Any]:
    """Returns a user's result as the fields of `RewardRecord`. Raises `MalformedResultError` with field and value."""
    expected = EvalMetricsResult if for_eval else RewardResult
    method = method or ("compute_eval_metrics" if for_eval else "compute_reward")
    if not isinstance(result, expected):
        fix = "EvalMetricsResult(metrics={...})" if for_eval else "RewardResult(total_reward=...)"
        write = "" if inspect.iscoroutine(result) else f": write `return {fix}`"
        raise MalformedResultError(f"{method} returned {_shown(result)}, not a {expected.__name__}{write}")
    if isinstance(result, EvalMetricsResult):
        metrics = _numbers(result.metrics, "metrics")
        total = metrics.get("reward")
    else:
        metrics = _numbers(result.sample_metrics, "sample_metrics")
        total = finite_number(result.total_reward, "total_reward")
    golden = {
        _text(key): None if value is None else _text(value)
        for key, value in _mapping(result.golden_answers, "golden_answers").items()
    }
    if not isinstance(result.info_turns, list | tuple):
        raise MalformedResultError(f"info_turns is {_shown(result.info_turns)}, not a list")
    turns = as_json(list(result.info_turns), "info_turns")
    tags = {_text(key): _text(value) for key, value in _mapping(result.sample_tags, "sample_tags").items()}
    return {
        "total_reward": total,
        "sample_metrics": metrics | (USAGE.get() or {}),
        "golden_answers": golden,
        "info_turns": turns,
        "sample_tags": tags,
    }


def serialize_tool_records(records: Any) -> list[dict[str, Any]]:
    """Returns `RolloutState.tool_records` as rows of `tool_calls`. Raises `MalformedResultError` with the value."""
    if not isinstance(records, list):
        raise MalformedResultError(f"tool_records is {_shown(records)}, not a list")
    rows: list[dict[str, Any]] = []
    for record in records:
        values = _mapping(record, "an entry of tool_records")
        texts = {key: values.get(key) for key in ("name", "arguments", "result", "error", "sandbox")}
        seconds = values.get("seconds")
        row: dict[str, Any] = {key: None if value is None else _text(value) for key, value in texts.items()}
        row["seconds"] = None if seconds is None else finite_number(seconds, "seconds of a tool call")
        rows.append(row)
    return rows


def _numbers(values: Any, field: str) -> dict[str, float]:
    return {_text(key): finite_number(value, f"{field}[{key!r}]") for key, value in _mapping(values, field).items()}


def finite_number(value: Any, field: str) -> float:
    """Returns a number from user code as a finite float. Raises `MalformedResultError` with field and value."""
    if isinstance(value, str):
        raise MalformedResultError(f"{field} is {_shown(value)}, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise MalformedResultError(f"{field} is {_shown(value)}, not a number") from None
    if not math.isfinite(number):
        raise MalformedResultError(f"{field} is {number}, not a finite number")
    if abs(number) > LARGEST_NUMBER:
        raise MalformedResultError(f"{field} is {number}, which is out of range: at most +-{LARGEST_NUMBER:g}")
    return number


def _mapping(value: Any, field: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise MalformedResultError(f"{field} is {_shown(value)}, not a dict")
    return value


def _text(value: Any) -> str:
    """Returns a string that can be encoded as UTF-8. Lone surrogates become question marks."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


def as_json(value: Any, field: str) -> Any:
    """Returns the value as JSON types. Values without a JSON form, including NaN and infinity, become text."""
    try:
        text = json.dumps(value, default=_text, ensure_ascii=False).encode("utf-8", "replace")
        return json.loads(text, parse_constant=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedResultError(f"{field} cannot be written as JSON: {error}") from None


def _shown(value: Any) -> str:
    if inspect.iscoroutine(value):
        value.close()  # otherwise Python warns, too
        return f"the coroutine {value.__qualname__} (await it, in an `async def`)"
    try:
        text = repr(value)
    except Exception as error:
        text = f"(its repr raises {type(error).__name__})"
    return f"{type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"


def serialize_messages(messages: Any, method: str, expected: str = "a list of messages") -> list[ChatMessage]:
    """Checks and converts messages that `method` returned.

    They must be a list of dicts, each with a `role` and text content; `expected` describes the expected result in
    errors. A `content` list of text parts becomes one text, as in model servers. Other content is refused, because a
    chat template would silently write `None` or an object's address into the prompt.
    """
    if not isinstance(messages, list | tuple):
        raise MalformedResultError(f"{method} returned {_shown(messages)}, not {expected}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise MalformedResultError(f"{method} returned the message {_shown(message)}, not a dict with a role")
    with_text = [_with_text(message, method) for message in messages]
    return as_json(with_text, method)


def _with_text(message: ChatMessage, method: str) -> ChatMessage:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if isinstance(content, int | float | np.number):
        return {**message, "content": str(content)}
    if isinstance(content, list | tuple) and content and all(_is_text_part(part) for part in content):
        return {**message, "content": "\n".join(part if isinstance(part, str) else part["text"] for part in content)}
    if isinstance(content, list | tuple):
        content = next((part for part in content if not _is_text_part(part)), content)
    raise MalformedResultError(
        f"{method} returned a message of {message['role']!r} whose content is {_shown(content)}, not a text; "
        "convert it, for example with json.dumps"
    )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, str) or (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def check_verdict(verdict: Any) -> tuple[bool, str | None]:
    """Checks the result of `is_done`. Returns whether the rollout is done, and why."""
    done, reason = verdict if isinstance(verdict, tuple | list) and len(verdict) == 2 else (verdict, None)
    if not isinstance(done, bool | np.bool_):  # a number or a text may be truthy by accident
        raise MalformedResultError(f"is_done returned {_shown(verdict)}, not a pair of a bool and a reason")
    return bool(done), None if reason is None else _text(reason)


def sample_uid(sample: Sample) -> str:
    """Returns the identity of a dataset item.

    It is 16 hex digits over prompt, answer and metadata. It does not depend on the environment's name or the position
    in the dataset, so an evaluation item is recognized in a training set of another name.
    """
    metadata = {key: value for key, value in sample.metadata.items() if key != ENV_NAME_KEY}
    content = [sample.prompt, sample.answer, metadata]
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, default=repr, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
