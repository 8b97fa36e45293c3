"""Sixty problems made from the templates in `own_problems.toml`, in the same form as the hub's rows.

Invariant: the problems depend only on these two files.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

NUM_TESTS = 8


class _Inputs:
    """Functions with which templates create inputs. Inputs grow with the test's number n."""

    def __init__(self, seed: str, parameter: Any) -> None:
        self.rng, self.parameter = random.Random(seed), parameter

    def numbers(self, n: int, low: int = -20, high: int = 40) -> list[int]:
        return [self.rng.randint(low, high) for _ in range(3 * n * n + 1)]

    def words(self, count: int) -> str:
        return " ".join("".join(self.rng.choices("abcde", k=self.rng.randint(1, 3))) for _ in range(count))

    def lines(self, *rows: Any) -> str:
        return "".join(f"{' '.join(map(str, row)) if isinstance(row, list) else row}\n" for row in rows)

    def brackets(self, n: int) -> str:
        kinds, text = self.parameter, ""
        for _ in range(3 * n):
            at = 2 * self.rng.randrange(len(kinds) // 2)
            text = f"{kinds[at]}{text}{kinds[at + 1]}" if self.rng.random() < 0.5 else f"{text}{kinds[at : at + 2]}"
        return text if n % 3 else text[:n] + self.rng.choice(kinds) + text[n:]

    def grid(self, n: int) -> str:
        rows = [["#" if self.rng.random() < 0.25 else "." for _ in range(n + 2)] for _ in range(n + 1)]
        rows[0][0] = rows[-1][-1] = "."
        return self.lines(f"{n + 1} {n + 2}", *("".join(row) for row in rows))


def _output(solution: str, function: str, given: Any) -> Any:
    """Returns the output of a reference solution, which is code of this package, for an input."""
    scope: dict[str, Any] = {}
    if function:
        exec(solution, scope)
        return scope[function](*given)
    with mock.patch.object(sys, "stdin", io.StringIO(given)), contextlib.redirect_stdout(io.StringIO()) as out:
        exec(solution, scope)
    return out.getvalue()


@cache
def own_rows() -> tuple[dict[str, Any], ...]:
    """Returns the problems as rows with `question`, `info`, `difficulty` (1 to 3) and the reference `solution`."""
    rows = []
    for template in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["template"]:
        function = template.get("function", "")
        for parameter in template["parameters"]:
            inputs = _Inputs(f"{template['statement']} {parameter}", parameter)
            scope = {name: getattr(inputs, name) for name in ("rng", "numbers", "words", "lines", "brackets", "grid")}
            given = [eval(template["inputs"], scope | {"n": n}) for n in range(1, NUM_TESTS + 1)]
            question, solution = (template[key].replace("@K", str(parameter)) for key in ("statement", "solution"))
            tests = {"inputs": given, "outputs": [_output(solution, function, each) for each in given]}
            tests |= {"fn_name": function} if function else {}
            info = json.dumps({"tests": json.dumps(tests), "source": "own"})
            rows.append(
                {
                    "question": question if function else f"Write a program. {question}",
                    "info": info,
                    "difficulty": template["difficulty"],
                    "solution": solution,
                }
            )
    return tuple(rows)
