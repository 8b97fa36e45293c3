"""Keeping Python's cycle collector from stopping the event loop.

A full collection visits every object of the process. With thousands of samples in flight and Ray and torch loaded that
is hundreds of milliseconds, several times a minute, in which no answer is read and no lane is filled. Almost nothing
that the driver makes lies in a cycle, so reference counts free it; what does is mostly young when it dies.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (1_000, 3, 8_000)
"""Containers made and not freed before a young collection, young ones before a middle one, middle before a full one.
With thousands of samples in flight nearly all of them are alive when they are looked at, so a middle collection visits
1,000 x 5 containers at about 1 us each, and a full one comes at most every 32 million. Smaller ones visit no container
oftener, they only stop the loop for less long at a time. Python's own: (700, 10, 10)."""


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Collect once, leave what exists now out of later collections, and make full ones rare. Undone at the end."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
