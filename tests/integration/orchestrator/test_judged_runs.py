"""A judge that fails half of the time costs samples, and trains nothing wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.judge import grades, judge_server
from tests.integration.orchestrator.harness import Ground, harness

from telescope.record.reader import Run


def answer_of(body: dict[str, Any]) -> str:
    """Returns the answer that a request shows to the judge, between its marks."""
    prompt = body["messages"][0]["content"]
    mark = prompt.split("two marks ")[1][:12]
    return prompt.split(f"\n{mark}\n")[1]


def grade_of(answer: str) -> int:
    return 10 if len(answer) % 2 else 0


@pytest.mark.asyncio(loop_scope="session")
async def test_samples_whose_judge_fails_are_masked_and_the_others_get_its_grade(ground: Ground, tmp_path: Path):
    failed: set[str] = set()

    def judge(body: dict[str, Any]) -> Any:
        answer = answer_of(body)
        if sum(answer.encode()) % 2:
            failed.add(answer)
            return 400, "refused", {}
        return grades(body, grade_of(answer))

    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}?", "answer": "1"}) for n in range(20)))
    with judge_server(judge) as (url, _):
        kwargs = {"path": str(tmp_path / "rows.jsonl"), "reward": "judge", "judge": {"url": url, "model": "j"}}
        environments = [{"name": "dataset", "kwargs": kwargs}]
        async with harness(
            ground, tmp_path, environments=environments, group_size=8, number_of_steps=3, max_model_len=512
        ) as run:
            await run.run()
            assert run.orchestrator.ledger.is_balanced()
    record = Run(tmp_path)
    answers = {turn["sample_id"]: turn["text"].strip() for turn in record.table("turns").to_pylist()}
    samples = record.table("samples").to_pylist()
    masked = [sample for sample in samples if sample["status"] == "masked"]
    assert 0.2 < len(masked) / len(samples) < 0.8
    assert {(sample["failure_kind"], sample["reward"]) for sample in masked} == {("infrastructure", None)}
    for sample in samples:
        if sample["status"] in ("kept", "discarded") and (answer := answers.get(sample["sample_id"])):
            assert answer not in failed
            assert sample["reward"] == grade_of(answer) / 10
