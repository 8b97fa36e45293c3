"""The environment of docs/sandboxes.md runs as it is written there."""

from pathlib import Path

import pytest

from telescope.environments.local_rollout import Answer, roll_out_item
from telescope.environments.registry import get_environment

DOCUMENT = Path(__file__).parents[3] / "docs" / "sandboxes.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "programs").mkdir()
    code = DOCUMENT.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "programs" / "environment.py").write_text(code)
    return tmp_path


@pytest.mark.sandbox
@pytest.mark.parametrize(("answer", "reward"), [("print(1 + 2)", 1.0), ("print(4)", 0.0), ("1/0", 0.0)])
def test_an_answer_is_run_in_a_sandbox_and_scored(folder: Path, answer: str, reward: float):
    environment = get_environment("programs", environments_path=[folder], pool_size=1, memory_mb=256, disk_size_gb=0.05)
    rollout = roll_out_item(environment, 0, lambda _: Answer(answer))
    assert rollout.score["total_reward"] == reward
