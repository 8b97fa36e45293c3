"""Numbers of things in a sentence."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`: for nouns whose plural adds an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
