"""The agent that `telescope envs new --kind agent` writes can be trained as it is."""

from collections import Counter
from pathlib import Path

import pytest
from tests.integration.orchestrator.harness import Ground, harness

from telescope.cli.envs import write_new
from telescope.record.reader import Run


@pytest.mark.asyncio(loop_scope="session")
async def test_a_new_agent_is_trained(ground: Ground, tmp_path: Path):
    write_new("mine", tmp_path / "environments", "agent")
    async with harness(
        ground, tmp_path / "run", environments=[{"name": "mine"}], environments_path=[str(tmp_path / "environments")],
        group_size=4, number_of_steps=2, max_model_len=512, discard_group_zero_advantage=False,
    ) as run:  # fmt: skip
        await run.run()
        assert run.orchestrator.ledger.is_balanced()
    record = Run(tmp_path / "run")
    turns = record.table("turns").to_pylist()
    calls = Counter(turn["sample_id"] for turn in turns if turn["role"] == "assistant")
    scored = [sample for sample in record.table("samples").to_pylist() if sample["reward"] is not None]
    assert scored and {calls[sample["sample_id"]] for sample in scored} == {2}
