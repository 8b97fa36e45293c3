"""What users' code returns, as plain values that can be sent to the driver, or a complaint that names the field.

Nothing is passed on as it is: numbers become finite floats, texts become UTF-8, everything else what JSON knows.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from telescope.environments.base import ChatMessage, EvalMetricsResult, RewardResult

LARGEST_NUMBER = 1e30
"""Of a reward or a metric. Squares of such numbers are finite in float64, and advantages, and their sum over the tokens
of a batch, in float32."""


class MalformedResultError(TypeError):
    """User code returned something that its interface does not allow."""


def plain_score(result: Any, for_eval: bool) -> dict[str, Any]:
    """A user's result as the fields of `RewardRecord`. Raises `MalformedResultError` naming the field and value."""
    expected = EvalMetricsResult if for_eval else RewardResult
    method = "compute_eval_metrics" if for_eval else "compute_reward"
    if not isinstance(result, expected):
        raise MalformedResultError(f"{method} returned {_shown(result)}, not a {expected.__name__}")
    if isinstance(result, EvalMetricsResult):
        metrics = _numbers(result.metrics, "metrics")
        total = metrics.get("reward")
    else:
        metrics = _numbers(result.sample_metrics, "sample_metrics")
        total = _number(result.total_reward, "total_reward")
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
        "sample_metrics": metrics,
        "golden_answers": golden,
        "info_turns": turns,
        "sample_tags": tags,
    }


def _numbers(values: Any, field: str) -> dict[str, float]:
    return {_text(key): _number(value, f"{field}[{key!r}]") for key, value in _mapping(values, field).items()}


def _number(value: Any, field: str) -> float:
    if isinstance(value, str):
        raise MalformedResultError(f"{field} is {_shown(value)}, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise MalformedResultError(f"{field} is {_shown(value)}, not a number") from None
    if not math.isfinite(number):
        raise MalformedResultError(f"{field} is {number}, not a finite number")
    if abs(number) > LARGEST_NUMBER:
        raise MalformedResultError(f"{field} is {number}, which is out of range: at most {LARGEST_NUMBER:g} either way")
    return number


def _mapping(value: Any, field: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise MalformedResultError(f"{field} is {_shown(value)}, not a dict")
    return value


def _text(value: Any) -> str:
    """A string that can be written as UTF-8; lone surrogates become question marks."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


def as_json(value: Any, field: str) -> Any:
    """The value as JSON types; what JSON does not know, NaN and infinity included, becomes its text."""
    try:
        text = json.dumps(value, default=_text, ensure_ascii=False).encode("utf-8", "replace")
        return json.loads(text, parse_constant=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedResultError(f"{field} cannot be written as JSON: {error}") from None


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"(its repr raises {type(error).__name__})"
    return f"{type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"


def plain_messages(messages: Any, method: str) -> list[ChatMessage]:
    """Messages that `method` returned: a list of dicts, each with a `role` and a text.

    A `content` of parts becomes their text, as model servers take it. Anything but text is refused: a chat template
    writes `None` or the address of an object without a word, and the model reads it.
    """
    if not isinstance(messages, list | tuple):
        raise MalformedResultError(f"{method} returned {_shown(messages)}, not a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise MalformedResultError(f"{method} returned the message {_shown(message)}, not a dict with a role")
    with_text = [_with_text(message, method) for message in messages]
    plain: list[ChatMessage] = as_json(with_text, method)
    return plain


def _with_text(message: ChatMessage, method: str) -> ChatMessage:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if isinstance(content, int | float | np.number):
        return {**message, "content": str(content)}
    if isinstance(content, list | tuple) and content and all(_is_text_part(part) for part in content):
        return {**message, "content": "\n".join(part if isinstance(part, str) else part["text"] for part in content)}
    raise MalformedResultError(
        f"{method} returned a message of {message['role']!r} whose content is {_shown(content)}, not a text; write it "
        "out, with json.dumps perhaps"
    )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, str) or (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def plain_verdict(verdict: Any) -> tuple[bool, str | None]:
    """What `is_done` returned: whether it is, and why."""
    done, reason = verdict if isinstance(verdict, tuple | list) and len(verdict) == 2 else (verdict, None)
    if not isinstance(done, bool | np.bool_):  # a number or a text may be true without being meant
        raise MalformedResultError(f"is_done returned {_shown(verdict)}, not a pair of a bool and a reason")
    return bool(done), None if reason is None else _text(reason)
