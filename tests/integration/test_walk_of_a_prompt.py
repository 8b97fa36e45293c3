"""CONTRIBUTING.md lists the files that a prompt runs through."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADING = "## One prompt, from dataset to gradient"

MAX_FILES, MAX_CHANGES = 50, 22
"""Of the walk as it is, whose threads and server run in an order that varies. Lower them with it."""


def test_contributing_lists_the_files_that_a_traced_prompt_runs_through() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "trace_prompt.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *files, _, counts = done.stdout.splitlines()
    section = (ROOT / "CONTRIBUTING.md").read_text().partition(HEADING)[2].partition("\nAn environment of several")[0]
    steps = section.partition("\n1. ")[2]
    listed = re.findall(r"`([\w/]+\.py)`", steps)
    assert sorted(listed) == sorted(files)
    num_files, num_changes = map(int, re.findall(r"\d+", counts))
    assert num_files <= MAX_FILES and num_changes <= MAX_CHANGES
