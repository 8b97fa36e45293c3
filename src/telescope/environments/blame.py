"""Which line of the user's code an error comes from."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN_FOLDER = str(Path(__file__).parent)


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


def describe(error: BaseException, folder: Path | None = None) -> str:
    """`Type: message at file:line`, as text that can be written as UTF-8."""
    where = innermost_line(error, folder)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return (text + (f" at {where}" if where else "")).encode("utf-8", "replace").decode()
