"""Extracts answers from completions, and compares them.

Each extractor returns the last occurrence, since a model may correct itself, and `""` when there is none. All run in
time linear in the text: they search for fixed strings and never backtrack. Formulas are compared by `math_verifier`,
with a deadline.
"""

from __future__ import annotations

import re

from telescope.environments.math_verifier import check_equal

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_BOX = re.compile(r"\\(?:boxed|fbox)(?:[ \t\n]{0,8}\{|[ \t]{1,8}([0-9]{1,20})(?![0-9A-Za-z.,]))")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s{0,8}\{([^{}]{0,200})\}")


def strip_think_tags(text: str) -> str:
    """The text without its `<think>...</think>` parts.

    A closing tag without an opening one ends thinking that the prompt began: everything before it is removed. An
    opening tag that is never closed is thinking that was cut off: everything after it is removed.
    """
    kept: list[str] = []
    position = 0
    opening = closing = -2  # not searched yet; each is searched again only once `position` has passed it
    while True:
        if -1 != opening < position:
            opening = text.find(THINK_OPEN, position)
        if -1 != closing < position:
            closing = text.find(THINK_CLOSE, position)
        if closing != -1 and (opening == -1 or closing < opening):
            kept.clear()
            position = closing + len(THINK_CLOSE)
        elif opening == -1:
            kept.append(text[position:])
            break
        else:
            kept.append(text[position:opening])
            if closing == -1:
                break
            position = closing + len(THINK_CLOSE)
    return "".join(kept).strip()


def extract_xml_tag(text: str, tag: str) -> str:
    """Content of the last complete `<tag>...</tag>`, stripped; `""` without one."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end != -1 else -1
    return text[start + len(opening) : end].strip() if start != -1 else ""


def extract_answer_tags(text: str) -> str:
    """Content of the last complete `<answer>...</answer>`, stripped; `""` without one."""
    return extract_xml_tag(text, "answer")


def extract_boxed_answer(text: str) -> str:
    r"""Returns the content of the last complete `\boxed{...}`, or `""`.

    `\fbox{...}` and a digit after `\boxed` count too. Braces are balanced.
    """
    opened: list[int] = []
    last = ""
    boxes: list[tuple[int, int]] = []  # depth at which a box opened, and where its content starts
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\\":
            marker = _BOX.match(text, position)
            if marker is None:
                position += 2  # an escaped brace does not count
            elif marker[1] is not None:
                last, position = marker[1], marker.end()
            else:
                position = marker.end()
                opened.append(position)
                boxes.append((len(opened), position))
            continue
        if character == "{":
            opened.append(position)
        elif character == "}" and opened:
            if boxes and boxes[-1][0] == len(opened):
                last = text[boxes.pop()[1] : position].strip()
            opened.pop()
        position += 1
    return last


def extract_code_block(text: str, language: str = "python") -> str:
    """Content of the last closed fenced block marked with `language`. If there is none, of the last unmarked one.

    `""` when there is neither.
    """
    marked: str | None = None
    unmarked = ""
    label: str | None = None
    lines: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped.startswith("```"):
            lines.append(line)
        elif label is None:
            label = stripped[3:].strip().lower()
            lines = []
        else:
            if label == language.lower():
                marked = "\n".join(lines)
            elif label == "":
                unmarked = "\n".join(lines)
            label = None
    return marked if marked is not None else unmarked


def verify_exact_match(predicted: str, ground_truth: str) -> bool:
    """Equality after collapsing white space; case counts."""
    return " ".join(predicted.split()) == " ".join(ground_truth.split())


def verify_math_answer(predicted: str, ground_truth: str, timeout_seconds: float = 5.0) -> bool:
    """Compares two answers in LaTeX or plain notation with math-verify.

    An empty answer, one that is too long, and one that takes more than `timeout_seconds` to compare are not. Raises
    `UserError` when math-verify is not installed, `InfrastructureError` when the process that compares does not start.
    """
    if not predicted:
        return False
    same_words = verify_exact_match(*(_TEXT_COMMAND.sub(r"\1", text).casefold() for text in (predicted, ground_truth)))
    return same_words or check_equal(predicted, ground_truth, timeout_seconds)
