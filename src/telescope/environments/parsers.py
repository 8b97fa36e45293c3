"""Taking the answer out of a completion.

Plain functions on strings. Each extractor returns the last occurrence, because a model that corrects itself means its
last word, and None when there is none. All run in time linear in the text, whatever the model wrote: they search for
fixed strings and never backtrack. Comparing formulas is another matter (`math_verifier`), and has a deadline.
"""

from __future__ import annotations

import re

from telescope.environments.math_verifier import check_equal

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_BOX = re.compile(r"\\(?:boxed|fbox)(?:[ \t\n]{0,8}\{|[ \t]{1,8}([0-9]{1,20})(?![0-9A-Za-z.,]))")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s{0,8}\{([^{}]{0,200})\}")


def strip_think_tags(text: str) -> str:
    """The text without its `<think>...</think>` parts.

    A closing tag without an opening one ends thinking that the prompt had begun, so all before it goes; an opening tag
    that is never closed is thinking cut short, so all after it goes.
    """
    kept: list[str] = []
    position = 0
    opening = closing = -2  # not looked for yet; each is looked for again only when it lies behind us
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


def extract_xml_tag(text: str, tag: str) -> str | None:
    """Content of the last complete `<tag>...</tag>`, stripped."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    if end == -1:
        return None
    start = text.rfind(opening, 0, end)
    if start == -1:
        return None
    return text[start + len(opening) : end].strip()


def extract_answer_tags(text: str) -> str | None:
    """Content of the last complete `<answer>...</answer>`, stripped."""
    return extract_xml_tag(text, "answer")


def extract_boxed_answer(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}` (or `\fbox{...}`, or a digit after `\boxed`); braces are balanced."""
    opened: list[int] = []
    last: str | None = None
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


def extract_code_block(text: str, language: str = "python") -> str | None:
    """Content of the last closed fenced block that is marked with `language`, or, if there is none, with nothing."""
    marked: str | None = None
    unmarked: str | None = None
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


def verify_exact_match(answer: str | None, expected: str) -> bool:
    """Equality up to case and white space; None never matches."""
    if answer is None:
        return False
    return " ".join(answer.split()).casefold() == " ".join(expected.split()).casefold()


def verify_math_answer(answer: str | None, expected: str, timeout_seconds: float = 5.0) -> bool:
    """Whether two answers in LaTeX or plain notation mean the same, by the package math-verify.

    None, an answer too long to be one, and one that takes more than `timeout_seconds` to compare do not match. Raises
    `UserError` when math-verify is not installed, `InfrastructureError` when the process that compares cannot live.
    """
    if answer is None:
        return False
    same_words = verify_exact_match(*(_TEXT_COMMAND.sub(r"\1", text) for text in (answer, expected)))
    return same_words or check_equal(answer, expected, timeout_seconds)
