"""The end of a command's process: Python's own clean-up, and then the exit code, whatever native threads still do.

Ray leaves native threads behind `ray.shutdown()`. One of them (`opencensus::stats::DeltaProducer::RunHarvesterLoop`)
wakes every few seconds, and when that falls into the moment in which the C++ runtime destroys its globals, the process
dies of a segmentation fault: seen after a run that had ended well, on a machine that was busy. So a process that has
loaded Ray ends without that last phase. Everything of Python's comes first: non-daemon threads are joined, handlers of
`atexit` run, and standard output and error are flushed.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def exit_with(command: Callable[[], int]) -> NoReturn:
    """Run `command` and end the process with its code, or with 1 and a traceback for an exception."""
    code = 1

    def leave() -> None:
        if "ray" in sys.modules:
            for stream in (sys.stdout, sys.stderr):
                # The reader of our output (`head`, a pager) may have gone, which is its right.
                with suppress(BrokenPipeError):
                    if not stream.closed:
                        stream.flush()
            os._exit(code)

    # Handlers run in reverse order of their registration: this one, registered before anything else, is the last.
    atexit.register(leave)
    code = command()
    sys.exit(code)
