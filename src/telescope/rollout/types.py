"""Protocol of the request slots for rollouts. Fakes implement it in tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(eq=False)
class Lease:
    """One request slot of one server, until it is released. It permits the generation of one sample there."""

    server: int
    slot: int
    released: bool = False


class RequestSlots(Protocol):
    """Interface of the request slots for rollouts."""

    async def acquire(self, group: int, *, turn: int = 0, timeout: float) -> Lease:
        """Waits for a slot. `turn` counts from 0 and later turns go first. Raises DeadlineExceeded."""
        ...

    def release(self, lease: Lease) -> None:
        """Releases a slot; call it exactly once."""
        ...

    def forget_group(self, group: int) -> None:
        """Unbinds a finished group from its server."""
        ...
