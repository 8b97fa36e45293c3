"""The stacks of this process's threads as text, for reports of what a hanging process was doing."""

from __future__ import annotations

import faulthandler
import tempfile


def thread_stacks() -> str:
    """Stacks of every thread, as the interpreter's fault handler prints them."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
