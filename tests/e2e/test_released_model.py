"""`telescope verify` of SmolLM2-135M-Instruct: a released Llama with its own tokenizer and chat template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests import released

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_engine_and_trainer_agree_on_a_released_model(tmp_path: Path) -> None:
    target = tmp_path / "verify.json"
    fields = {
        "model": released.smollm2(), "trainer_num_workers": 1, "prompts_batch_size_for_trainer": 2,
        "max_model_len": 192, "seq_len": 512, "learning_rate": 1e-5, "inference_base_port": 18660, "json": target,
    }  # fmt: skip
    command = [sys.executable, "-m", "telescope", "verify", *(f"--{name}={fields[name]}" for name in fields)]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1100)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "all 8 checks hold" in finished.stdout
    by_name = {check["name"]: check["values"] for check in json.loads(target.read_text())["checks"]}
    assert by_name["engine and trainer logprobs agree (temperature 0.7)"]["max"] <= 1e-3
    assert by_name["the gradient does not depend on packing"]["relative_error"] <= 1e-4
