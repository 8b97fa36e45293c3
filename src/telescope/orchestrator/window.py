"""How far generation may run ahead of training, and what became of every draw.

Pure state, driven from outside. With B = `prompts_batch_size_for_trainer`, v = training steps whose weights are synced,
k = `max_async_rollout` and A = groups opened less groups given up, a group may be opened if and only if
A < (v + 1 + k) * B. So k = 0 is strictly synchronous, a discarded group is replaced at once, and nothing is surplus.

The ledger's invariant: draws opened = trained + dropped (each with a reason) + still open. A draw whose group became
too old goes back to the queue and stays open: its fate is not final.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class AsyncWindow:
    """Decides whether a group may be opened. `version` is v, `outstanding` is A."""

    batch_size: int
    max_async_rollout: int
    version: int = 0
    outstanding: int = 0

    def may_open(self) -> bool:
        """True when one more group fits the window."""
        return self.outstanding < (self.version + 1 + self.max_async_rollout) * self.batch_size

    def opened(self) -> None:
        """Count a group that was just opened."""
        assert self.may_open(), "a group was opened outside the async window"
        self.outstanding += 1

    def given_up(self) -> None:
        """Count a group that will never be trained; its place is free at once."""
        assert self.outstanding > 0
        self.outstanding -= 1

    def synced(self) -> None:
        """Count a training step whose weights have reached the engines."""
        self.version += 1


@dataclass
class Ledger:
    """Every draw that was opened, and its fate. Only draws still open are kept one by one; the rest are counts."""

    open: set[int] = field(default_factory=set)
    num_opened: int = 0
    num_trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    num_returned: int = 0
    """Times that a draw went back to the queue, over all draws."""
    _waiting: set[int] = field(default_factory=set)
    _returns: Counter[int] = field(default_factory=Counter)

    def opened(self, n: int) -> None:
        """A group was opened for draw n, for the first time or after a return."""
        if n in self._waiting:
            self._waiting.remove(n)
            return
        assert n not in self.open, f"draw {n} was opened twice"
        self.open.add(n)
        self.num_opened += 1

    def returned(self, n: int) -> None:
        """The group of draw n became too old; the draw waits to be opened again."""
        assert n in self.open, f"draw {n} is not open"
        assert n not in self._waiting, f"draw {n} was returned twice"
        self._waiting.add(n)
        self._returns[n] += 1
        self.num_returned += 1

    def returns(self, n: int) -> int:
        """How often draw n, which is open, was returned."""
        return self._returns[n]

    def trained(self, n: int) -> None:
        assert n not in self._waiting, f"draw {n} has no group"
        self.open.remove(n)
        self._returns.pop(n, None)
        self.num_trained += 1

    def drop(self, n: int, reason: str) -> None:
        assert n not in self._waiting, f"draw {n} has no group"
        self.open.remove(n)
        self._returns.pop(n, None)
        self.dropped[reason] += 1

    @property
    def waiting(self) -> frozenset[int]:
        """Draws that were returned and are not open as groups now."""
        return frozenset(self._waiting)

    def is_balanced(self) -> bool:
        """The invariant of the module docstring."""
        return self.num_opened == self.num_trained + sum(self.dropped.values()) + len(self.open)
