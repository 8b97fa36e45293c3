"""The agents of docs/agents.md run as they are written there."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.agents.test_agents import sampled_once

PAGE = (Path(__file__).parents[3] / "docs" / "agents.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SUMS = [str(b) for b in range(20)]
"""Answers to the dataset's first questions."""
CASES: dict[str, tuple[list[str], float, dict[str, Any]]] = {
    "Solver": (["5", "0"], 1.0, {}), "SolverWithChecker": (["5", "no"], 0.0, {}), "Reviewed": (["0", "yes"], 1.0, {}),
    "Program": (["unused"], 1.0, {}), "Diary": (SUMS, 1.0, {"max_context": 400}), "Polite": (["0", "Yes"], 1.0, {}),
    "Boxed": (["It is."], 0.0, {}),
}  # fmt: skip


@pytest.mark.sandbox
@pytest.mark.parametrize("name", CASES)
async def test_a_shown_agent_trains_what_was_sampled(bench: Any, name: str) -> None:
    shown: dict[str, Any] = {}
    for block in CODE:
        exec(block, shown)
    answers, reward, settings = CASES[name]
    cls = shown[name]
    if name == "Program":
        cls.command = (sys.executable, "-c", PROGRAM)
    made = await bench(cls, answers, **({"judge": {"url": "policy"}} if name == "Polite" else {}))
    sample = await made.run(**settings)
    assert sample.failure_message is None
    assert sample.reward.total_reward == reward
    sampled_once(sample, made.policy)


PROGRAM = """
import openai
openai.OpenAI(max_retries=0).chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
print(0)
"""


def test_every_shown_agent_is_run() -> None:
    assert re.findall(r"^class (\w+)", "\n".join(CODE), re.MULTILINE) == list(CASES)
