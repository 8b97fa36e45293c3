"""Parameters of the SDKs' functions, as recorded from prime-sandboxes 0.5.1, modal 1.6.4, daytona 0.226.1, e2b 2.63.0.

With an SDK installed, `python -m tests.unit.sandbox.signatures` records its part anew.
"""

import importlib
import inspect
import json
from pathlib import Path

RECORDED = Path(__file__).with_name("signatures.json")


def parameters(path: str) -> list[str]:
    """Returns the names of a function's parameters; `path` is module:attribute."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    found = found if callable(found) else found.aio  # the fakes of Modal's methods
    return [each for each in inspect.signature(found).parameters if each not in ("self", "cls")]


if __name__ == "__main__":
    recorded = json.loads(RECORDED.read_text())
    for each in recorded:
        try:
            recorded[each] = parameters(each)
        except ImportError:
            continue
    lines = (f" {json.dumps(path)}: {json.dumps(names)}" for path, names in recorded.items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
