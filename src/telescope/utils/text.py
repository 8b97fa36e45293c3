"""Formats text and counts, suggests names for mistyped ones, and checks paths."""

import os
import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path

from telescope.errors import UserError

LONGEST = 300  # characters in a line; an address, a port and a fix fit

# A title sequence without an end extends to the end of its line.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\r\n]*(?:\x07|\x1b\\|\x9c)?|\x1b[@-Z\\^_]"
)
# Without tabs and line ends. The last ones reorder a line, so that it displays other text than it contains.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Removes terminal escape sequences and all control characters except line ends."""
    lines = _ESCAPE.sub("", text).replace("\t", " ").splitlines()
    return "\n".join(CONTROL.sub("", line) for line in lines)


def single_line(text: str | None) -> str:
    """Returns the first visible line, without control characters, at most `LONGEST` long."""
    line = next((line.strip() for line in plain(text or "").split("\n") if line.strip()), "")
    return line if len(line) <= LONGEST else line[: LONGEST - 1].rstrip() + "…"


LONGEST_NAME, LONGEST_PATH = 255, 4096  # bytes that Linux allows for a file name and for a path


def path_problem(text: str) -> str | None:
    """Returns why no path can have this text, and the fix. None if a path can."""
    if "\0" in text:
        return "it must not contain the character NUL"
    if text.startswith("~") and os.path.expanduser(text) == text:
        return f"there is no user {text.partition('/')[0][1:]!r} on this machine; name another folder"
    if len(os.fsencode(text)) > LONGEST_PATH or any(len(os.fsencode(p)) > LONGEST_NAME for p in text.split("/")):
        return f"a path has at most {LONGEST_PATH} bytes, and each name in it {LONGEST_NAME}"
    return None


def user_path(path: str | Path) -> Path:
    """Returns the path that a user typed; `~` is the home directory.

    Raises `UserError` if it cannot be a path, or is in a folder that this user may not enter.
    """
    if problem := path_problem(str(path)):
        raise UserError(f"{str(path)[:80]!r} is not a path: {problem}")
    found = Path(path).expanduser()
    try:
        found.stat()
    except PermissionError as error:
        raise UserError(f"{str(found)!r} cannot be read: {error.strerror}. Ask its owner, or name another") from None
    except OSError:
        pass  # it need not exist
    return found


def home_folder(variable: str, usual: str) -> Path:
    """Returns Telescope's folder in the directory of an XDG variable, by default `usual` in the home directory."""
    return Path(os.environ.get(variable) or Path.home() / usual) / "telescope"


def pluralize(number: int, noun: str) -> str:
    """Returns `1 step` or `2 steps`; the plural adds an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def free_space(free: float, total: float) -> str:
    """Returns `0.3 of 64 MiB` or `11.2 of 252 GiB`, for bytes of a disk."""
    unit, name = (2**30, "GiB") if total >= 10 * 2**30 else (2**20, "MiB")
    return f"{free / unit:,.1f} of {total / unit:,.0f} {name}"


def listed(names: Iterable[str], most: int = 4, separator: str = ", ") -> str:
    """Returns the first `most` names, and the number of the others."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


SIMILAR_ENOUGH = 0.6  # below this similarity a suggestion confuses more than it helps
MISSPELLED = 0.8  # share of matching characters above which one name is a misspelling of the other


def num_equal(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns the length of the common beginning of two texts or lists of texts."""
    start, stop = 0, min(len(one), len(other))
    while start < stop:
        middle = (start + stop + 1) // 2
        if one[start:middle] == other[start:middle]:
            start = middle
        else:
            stop = middle - 1
    return start


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Returns the most similar known name, or None if nothing is close."""
    known = list(known)
    wanted = name.strip().lower().replace("-", "_")
    best = max(known, key=lambda candidate: _similarity(wanted, candidate.lower()), default=None)
    return best if best is not None and _similarity(wanted, best.lower()) >= SIMILAR_ENOUGH else None


def is_misspelled(name: str, known: Iterable[str]) -> bool:
    """Returns whether `name` misspells a known name. `min_size` is another name than `max_size`."""
    nearest = nearest_name(name, known)
    if nearest is None or _spelling(name.lower(), nearest.lower()) < MISSPELLED:
        return False
    return all(
        _spelling(*pair) > 0.5 for pair in zip(name.lower().split("_"), nearest.lower().split("_"), strict=False)
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` with a leading space, or an empty text."""
    nearest = nearest_name(name, known)
    return f" Did you mean '{nearest}'?" if nearest else ""


def _similarity(wanted: str, candidate: str) -> float:
    """Returns the similarity in [0, 1] of spelling, or of shared words: `warmup` shares a word with `warmup_steps`."""
    spelling = _spelling(wanted, candidate)
    words, candidate_words = set(wanted.split("_")), set(candidate.split("_"))
    shared = len(words & candidate_words)
    by_words = shared / len(words) * (0.7 + 0.3 * shared / len(candidate_words)) if words else 0.0
    return max(spelling, by_words)


def _spelling(one: str, other: str) -> float:
    """Returns the share of matching characters, between 0 and 1."""
    return SequenceMatcher(None, one, other).ratio()
