"""Which line of the user's code an error comes from, and what the error says.

Whatever was raised is told in words: an exception may have a `__str__` that raises, or megabytes of text.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN_FOLDER = str(Path(__file__).parent)

MAX_CHARACTERS = 2_000
"""Of an error's text. It is sent to the driver, logged, and recorded for every sample that it fails."""


def innermost_line(error: BaseException, folder: Path | None = None) -> str | None:
    """`file:line` where the error was raised, as near to its author as can be told.

    That is the innermost line in `folder`, where the environment lies; or else the innermost that is neither of an
    installed library nor of the machinery here that called it; or else the innermost of all. None without a traceback.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    if not frames:
        return None
    in_folder = [f for f in frames if folder is not None and Path(f.filename).is_relative_to(folder)]
    of_a_person = [f for f in frames if not f.filename.startswith(_LIBRARIES) and not _is_ours(f.filename)]
    chosen = (in_folder or of_a_person or frames)[-1]
    return f"{chosen.filename}:{chosen.lineno}"


def _is_ours(filename: str) -> bool:
    """Whether it is one of the modules of this package; the environments that ship here lie in folders of their own."""
    return str(Path(filename).parent) == _OWN_FOLDER


def in_words(error: BaseException) -> str:
    """`Type: message`, as text of bounded length that can be written as UTF-8; with the first error of a group."""
    name = type(error).__name__
    try:
        said = str(error)
    except Exception as worse:
        said = f"its text cannot be had, {type(worse).__name__}"
    if isinstance(error, BaseExceptionGroup):
        said = f"{said}, first {in_words(error.exceptions[0])}"
    text = f"{name}: {said}" if said else name
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}... ({len(text)} characters in all)"
    return text.encode("utf-8", "replace").decode()


def cause(error: BaseException) -> BaseException:
    """The error to tell of: Python turns a `StopIteration` inside of a generator or a coroutine into another one."""
    is_turned = isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration | StopAsyncIteration)
    return error.__cause__ or error if is_turned else error


def describe(error: BaseException, folder: Path | None = None) -> str:
    """`Type: message at file:line`, as text that can be written as UTF-8."""
    error = cause(error)
    where = innermost_line(error, folder)
    return in_words(error) + (f" at {where}" if where else "")
