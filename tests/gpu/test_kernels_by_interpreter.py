"""The Triton kernels that only a GPU can compile compute what they should, as Triton's interpreter sees them.

Needs Triton, which comes with torch for GPUs and not for the CPU, and no GPU. Run by hand: `pytest -m gpu tests/gpu`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("interpreted_kernels.py")


def test_the_kernels_of_the_output_layer_are_right_by_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", str(PROGRAM)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-500:]
