"""The boundary between an engine and everything else."""

import re
from pathlib import Path

import telescope

SOURCES = Path(telescope.__file__).parent
OF_THE_INSTALLATION = {"cli/doctor.py", "cli/train.py", "cluster/checks.py", "orchestrator/preflight.py"}
"""They check the installed vLLM."""


def test_nothing_outside_inference_knows_vllms_modules_routes_and_worker_methods() -> None:
    extension = (SOURCES / "inference/vllm/weights.py").read_text()
    methods = re.findall(r"def (telescope_\w+)\(", extension)
    assert len(methods) > 3
    known = re.compile("|".join([r"inference\.vllm", "call_worker", *methods]))
    sources = {str(path.relative_to(SOURCES)): path.read_text() for path in SOURCES.rglob("*.py")}
    assert {"inference/client.py"} < {name for name, text in sources.items() if known.search(text)}
    outside = {name for name, text in sources.items() if not name.startswith("inference/") and known.search(text)}
    assert outside <= OF_THE_INSTALLATION
