"""Collects what the parts of the GPU suite that are pytest runs would run on a machine that has just their GPUs.

Run as a program (with `-m`, from the repository's root), since it sets the number of GPUs for torch. Writes JSON: by
part the tests that run, those that are skipped, and pytest's exit code; under "everything" what eight GPUs would run of
them all.
"""

import dataclasses
import json
import os
import shlex
import sys
from typing import Any

import pytest
import torch
from tests.repository_modules import load_script


def suite_parts() -> list[Any]:
    with load_script("gpu_parts") as module:
        return [part for part in module.PARTS if part.command.startswith(module.PYTEST)]


class Collected:
    """A pytest plugin that notes what was collected."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = {"run": [], "skipped": []}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            marks = item.iter_markers("skipif")
            # Those of packages name no GPU; they depend on what is installed here.
            is_skipped = any(mark.args[0] for mark in marks if "GPU" in mark.kwargs["reason"])
            self.tests["skipped" if is_skipped else "run"].append(item.nodeid)


def collect(part: Any) -> dict[str, Any]:
    """Runs in a process of its own, because test files count the GPUs when they are imported."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        torch.cuda.device_count = lambda: part.num_gpus
        torch.cuda.is_available = lambda: True
        collected = Collected()
        arguments = shlex.split(part.command.partition(" -m pytest ")[2])
        os.dup2(2, 1)  # what pytest prints is no part of the answer
        code = pytest.main([*arguments, "--collect-only"], plugins=[collected])
        with os.fdopen(write_end, "w") as answer:
            json.dump(collected.tests | {"code": int(code)}, answer)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        found = json.load(answer)
    os.wait()
    return found


def main() -> None:
    import tests.integration.weights.vllm_server  # noqa: F401  # what takes long to import, once

    parts = suite_parts()
    everything = dataclasses.replace(
        parts[0], name="everything", command="python -m pytest -q -m gpu tests/gpu", num_gpus=8
    )
    json.dump({part.name: collect(part) for part in (everything, *parts)}, sys.stdout)


if __name__ == "__main__":
    main()
