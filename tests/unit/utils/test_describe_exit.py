"""Exit codes in words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from telescope.utils.process import describe_exit


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_exit_code_names_the_signal(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_the_code_is_that_of_subprocess() -> None:
    ended = subprocess.run([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"])
    assert describe_exit(ended.returncode) == "was killed by SIGTERM"
