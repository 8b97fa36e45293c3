"""Extracts answers from completions, and compares them.

Each extractor returns the last occurrence, since a model may correct itself, and `""` if there is none. All run in time
linear in the text: they search for fixed strings and never backtrack. Formulas are compared by `math_verifier`, with a
deadline.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from telescope.environments.math_notation import CHANGING_WORD, normalize_answer, split_integers
from telescope.environments.math_verifier import check_equal

END_OF_MESSAGE = "<|end|>"
"""Ends reasoning only where its own tag began it: other models end every message with it."""
REASONING_TAGS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
    "<|channel|>analysis<|message|>": END_OF_MESSAGE,
}
"""Tags that begin and end the reasoning of released models."""

_TAG = re.compile(rf"({'|'.join(map(re.escape, REASONING_TAGS))})|{'|'.join(map(re.escape, REASONING_TAGS.values()))}")
_BOX = re.compile(r"\\(?:boxed|fbox)(?:[ \t\n]{0,8}\{|[ \t]{1,8}([0-9]{1,20})(?![0-9A-Za-z.,]))")
_ANSWER_MARK = re.compile(
    r"answer[ \t*_]{0,8}(?:\bis\b|[:\uff1a=])|(?:答案|答え)[ \t*_]{0,8}[是为為は:\uff1a]"
    r"|^[ \t#*_]{0,8}(?:final )?answer[ \t*_]{0,8}$",
    re.IGNORECASE | re.MULTILINE,
)
"""Text that precedes an answer: "answer:" or "answer is", in Chinese and Japanese too, or a line with only "Answer"."""
_BEHIND_ANSWER = re.compile(
    r"(?<=[0-9)\]}$%*])(?:\.\s+(?=[A-Z0-9(\\$*])(?!(?i:or|and|not)\b)"  # another sentence, but no second answer
    r"|[,;]?\s+(?:because|since|as|which|so)\b|\s+\((?i:see|as|since|because|from|by|check|note|rounded)\b)"
    r"|[,;]?\s+because\b|。|\uff0c(?=[因所故即])"
    r"|(?:(?<=[A-Za-z]{3})|(?<=\b[Nn]o))\.\s+(?=(?:The|This|That|We|So|Because|Since|It|I|Here|There|Check|Note)\b)"
)
"""Text that ends an answer within its line. Only certain words count: "Mrs. Smith" is a name."""
_HEADING = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|^#|^[0-9]{1,2}[.):](?:\s|$)")
"""Matches headings such as `#### Step 2` and `#### 2. Sum`, which are no answers."""
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s{0,8}\{([^{}]{0,200})\}")
_GREEK = re.compile(r"\\(?:gamma|delta|theta|lambda|xi|pi|sigma|upsilon|phi|psi|omega)(?![A-Za-z])", re.IGNORECASE)
"""Letters whose case matters. math-verify ignores the case of all letters."""
_CHOICE = re.compile(r"\(?([A-J])(?:\)?$|(?:\)|\.|:)(?:\\[ ,;]|\s))")
"""A letter of multiple choice, alone or before the text of the choice."""
_CHOICES = re.compile(r"[A-J](?:\s*(?:[,;]|\band\b)?\s*[A-J])+")
"""Several letters of multiple choice: "ACD", "A, C"."""
_CHOICE_MARK = re.compile(r"\b[A-J][).:]|\b[A-J]$|\bor\b")
_WORDS = re.compile(r"(?=[b-df-hj-np-tv-z]*[^\W\d_b-df-hj-np-tv-z])[^\W\d_]{4,}(?: [^\W\d_]+)*")
"""Words, the first with a vowel: `mnpq` is a product."""
_AND = re.compile(r"\b(and|or)\b")
_BETWEEN_WORDS = re.compile(r" numbers?\b| ")
_DOTTED_HOUR = re.compile(r"\b([ap])\.m\b\.?")
_SPACE_AT_SIGN = re.compile(r"\s{0,9}([^\w\s])\s{0,9}")
_HOUR = re.compile(r"[0-9]\s*([ap])\.?m\b", re.IGNORECASE)


class UnfinishedReasoning(str):
    """A completion that is reasoning to its end: it was cut off, or the model never closed the tag.

    No parser finds an answer or a tool call in it. Its string methods return unfinished reasoning too.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return self


class ContinuedReasoning(str):
    """A completion that begins inside reasoning that its prompt opened, and closes it."""

    __slots__ = ()

    def __str__(self) -> str:
        return self


def _kept_by(method: Callable[..., Any]) -> Callable[..., Any]:
    def keep(result: Any) -> Any:
        if isinstance(result, list | tuple):
            return type(result)(map(keep, result))
        return UnfinishedReasoning(result) if isinstance(result, str) else result

    return wraps(method)(lambda *args, **kwargs: keep(method(*args, **kwargs)))


_STRING_METHODS = (
    "__add__ __getitem__ strip lstrip rstrip removeprefix removesuffix replace expandtabs translate lower upper "
    "casefold split rsplit splitlines partition rpartition"
)
for _name in _STRING_METHODS.split():
    setattr(UnfinishedReasoning, _name, _kept_by(getattr(str, _name)))


def opening_tag(prompt: str) -> str:
    """Returns the tag at the end of the prompt that opens reasoning. `""` if there is none."""
    return next((tag for tag in REASONING_TAGS if prompt.rstrip().endswith(tag)), "")


def answer_text(text: str, opened: str = "") -> str:
    """Returns a completion's text for scoring, marked as reasoning where needed.

    The result is an `UnfinishedReasoning` if the completion ends before its reasoning does, and a `ContinuedReasoning`
    if it closes the reasoning that the prompt opened. `opened` is the tag at the end of the prompt (`opening_tag`).
    """
    begins = text.lstrip()
    for opening, closing in REASONING_TAGS.items():
        if begins.startswith(opening):
            return text if closing in text else UnfinishedReasoning(text)
    closes = any(tag[1] is None and tag[0] != END_OF_MESSAGE for tag in _TAG.finditer(text))
    if not opened:
        return text
    return ContinuedReasoning(text) if closes else UnfinishedReasoning(text)


def closing_tag(text: str, opened: str = "") -> str:
    """Returns the missing closing tag of a completion that was cut off in its reasoning. `""` for any other."""
    if not isinstance(answer_text(text, opened), UnfinishedReasoning):
        return ""
    tag = next((tag for tag in REASONING_TAGS if text.lstrip().startswith(tag)), opened)
    return REASONING_TAGS[tag]


def strip_think_tags(text: str) -> str:
    """Returns the text without its reasoning, `<think>...</think>`. A text without a closing tag is returned unchanged.

    A closing tag without an opening one ends reasoning that the prompt began: everything before it is removed. After a
    closing tag, an opening one that is never closed begins reasoning that was cut off. Nothing is left of a completion
    that ends before its reasoning does (`UnfinishedReasoning`).
    """
    if isinstance(text, UnfinishedReasoning):
        return ""
    if not any(tag[1] is None for tag in _TAG.finditer(text)):
        return text
    kept: list[str] = []
    position, inside = 0, False
    for tag in _TAG.finditer(text):
        if tag[1] is None:
            if not inside and tag[0] != END_OF_MESSAGE:
                kept.clear()
            if inside or tag[0] != END_OF_MESSAGE:
                position, inside = tag.end(), False
        elif not inside:
            kept.append(text[position : tag.start()])
            inside = True
    return "".join(kept if inside else [*kept, text[position:]]).strip()


def extract_xml_tag(text: str, tag: str) -> str:
    """Returns the content of the last complete `<tag>...</tag>`, stripped. `""` if there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = -1 if isinstance(text, UnfinishedReasoning) else text.rfind(closing)
    start = text.rfind(opening, 0, end) if end != -1 else -1
    return text[start + len(opening) : end].strip() if start != -1 else ""


def extract_answer_tags(text: str) -> str:
    """Returns the content of the last complete `<answer>...</answer>`, stripped. `""` if there is none."""
    return extract_xml_tag(text, "answer")


def extract_boxed_answer(text: str) -> str:
    r"""Returns the content of the last complete `\boxed{...}`, or `""`.

    `\fbox{...}` and a digit after `\boxed` count too. Braces are balanced.
    """
    opened: list[int] = []
    last = ""
    boxes: list[tuple[int, int]] = []  # brace depth at a box's start, and the start of its content
    position = len(text) if isinstance(text, UnfinishedReasoning) else 0
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
    """Returns the last closed fenced block marked with `language`, or else the last unmarked one.

    `""` if there is neither. `py` and `python3` mean Python. The closing fence may also end a line of code. A
    block that is indented, as in a list, loses the indentation of its fence.
    """
    language = language.lower()
    marked: str | None = None
    unmarked = label = fence = ""
    lines: list[str] = []
    indent = 0
    for line in [] if isinstance(text, UnfinishedReasoning) else text.splitlines():
        stripped = line.strip()
        line = line[min(indent, len(line) - len(line.lstrip())) :] if fence else line
        if not fence:
            if stripped[:3] in ("```", "~~~") and "```" not in (info := stripped.lstrip("`~")):
                fence, lines, indent = stripped[:3], [], len(line) - len(line.lstrip())
                label = next(iter(info.lower().split()), "")  # attributes may follow it
                label = "python" if label in ("py", "python3") and label != language else label
        elif stripped.startswith(fence) or stripped.endswith(fence):
            block = "\n".join(lines if stripped.startswith(fence) else [*lines, line.rstrip().rstrip(fence)])
            marked, unmarked = (block if label == language else marked), (unmarked if label else block)
            fence = ""
        else:
            lines.append(line)
    return marked if marked is not None else unmarked


def extract_stated_answer(text: str) -> str:
    """Returns the final answer of a text in a common form, or `""`.

    The forms in order: the last box, the text after `####` in the last line or in an earlier line that begins with it
    and is no heading, `<answer>` tags, the last "Answer:" or "answer is" up to the end of its sentence.
    """
    if answer := extract_boxed_answer(text):
        return answer
    for number, line in enumerate(reversed(text.rstrip().splitlines())):
        before, marker, answer = line.rpartition("####")
        answer = answer.partition("</answer>")[0].strip(" \t*")
        if marker and answer and (number == 0 or not (before.strip(" \t*") or _HEADING.search(answer))):
            return answer
    if answer := extract_answer_tags(text):
        return extract_stated_answer(answer) or answer
    marks = list(_ANSWER_MARK.finditer(text))
    stated = text[marks[-1].end() :].lstrip(" \t\r\n*_:\uff1a") if marks else ""
    line = stated.removeprefix("$$\n").removeprefix("\\[\n").partition("\n")[0]
    return _BEHIND_ANSWER.split(line, maxsplit=1)[0].strip(" \t\r*_#").removesuffix(".").strip(" *_")


def verify_exact_match(predicted: str, ground_truth: str) -> bool:
    """Returns whether the texts are equal after collapsing white space. Case counts."""
    return " ".join(predicted.split()) == " ".join(ground_truth.split())


def verify_math_answer(predicted: str, ground_truth: str, timeout_seconds: float = 5.0) -> bool:
    """Compares two answers in LaTeX or plain notation with math-verify.

    If `ground_truth` is worked out, such as GSM8K's, its final answer counts (`extract_stated_answer`). Answers that
    are empty, too long, or take more than `timeout_seconds` to compare are not equal. Raises `UserError` when
    math-verify is not installed, `InfrastructureError` when the comparing process does not start.
    """
    if not predicted:
        return False
    ground_truth = extract_stated_answer(ground_truth) or ground_truth
    texts = [_TEXT_COMMAND.sub(r"\1", normalize_answer(text)) for text in (predicted, ground_truth)]
    choice, chosen = _CHOICE.fullmatch(texts[1]), _CHOICE.match(texts[0])
    if choice and chosen and not _CHOICE_MARK.search(texts[0], chosen.end()):
        return choice[1] == chosen[1]
    if all(map(_CHOICES.fullmatch, texts)):
        return sorted(re.findall("[A-J]", texts[0])) == sorted(re.findall("[A-J]", texts[1]))
    changes = [set(map(str.lower, CHANGING_WORD.findall(text))) for text in texts]
    hours = [set(map(str.lower, _HOUR.findall(text))) for text in texts]
    if changes[0] != changes[1] or (all(hours) and hours[0] != hours[1]):
        return False  # math-verify ignores words behind a number
    integers = [name for text in (predicted, ground_truth) if (name := split_integers(text)[1])]
    if len(set(integers)) > 1:
        return False
    letters = [set(_GREEK.findall(text)) for text in texts]
    if letters[0] != letters[1] and {x.lower() for x in letters[0]} == {x.lower() for x in letters[1]}:
        return False
    texts = [_DOTTED_HOUR.sub(r"\1m", text.casefold()).replace("solutions", "solution") for text in texts]
    texts = [_SPACE_AT_SIGN.sub(r"\1", text) for text in texts]
    # math-verify reads the product of their letters, in any order. Products are written in alphabetical order.
    if all(map(_WORDS.fullmatch, texts)) and list(texts[1]) != sorted(texts[1]):
        items = [sorted(_BETWEEN_WORDS.sub("", item) for item in _AND.split(text)) for text in texts]
        return items[0] == items[1]
    return verify_exact_match(*texts) or check_equal(predicted, ground_truth, timeout_seconds)
