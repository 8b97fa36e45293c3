"""Rollouts of agents on a real vLLM train exactly what was sampled, also when weights change in their middle."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.e2e.stack.conftest import Outcome, Stack
from transformers import AutoTokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

NUM_CALLS = 5


def answers_seen(run: Outcome) -> dict[str, list[dict[str, Any]]]:
    """What the agent of each sample noted of its answers."""
    seen: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in run.record.table("info").to_pylist():
        seen[row["sample_id"]].append(json.loads(row["value"]))
    return seen


def trained_answers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trained stretches of a sample's sequences, each with the ids before it."""
    answers = []
    for row in rows:
        trained = np.array([False, *row["trained"], False])
        edges = np.flatnonzero(trained[1:] != trained[:-1])
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            names = ("token_ids", "engine_logprobs", "trainer_logprobs", "versions")
            values = {name: row[name][start:end] for name in names}
            answers.append({"prompt": row["token_ids"][:start], "step": row["step"], **values})
    return answers


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def run(stack: Stack) -> Outcome:
    return await stack.run(environment="forks", number_of_steps=4, max_async_rollout=2, record_tokens="all")


async def test_each_answer_is_trained_once_as_it_was_sampled(stack: Stack, run: Outcome) -> None:
    seen, tokens = answers_seen(run), defaultdict(list)
    for row in run.record.table("tokens").to_pylist():
        tokens[row["sample_id"]].append(row)
    tokenizer = AutoTokenizer.from_pretrained(stack.parts.config.model)
    kept = run.samples(status="kept")
    assert kept
    for sample in kept:
        rows = tokens[sample["sample_id"]]
        assert len(rows) == 3, "the conversation, its branch and the chat"
        trained = trained_answers(rows)
        sampled = seen[sample["sample_id"]]
        assert len(trained) == len(sampled) == NUM_CALLS
        assert sorted(a["token_ids"] for a in trained) == sorted(a["token_ids"] for a in sampled)
        for answer in sampled:
            prompt = tokenizer.apply_chat_template(answer["messages"], tokenize=False, add_generation_prompt=True)
            found = [
                a for a in trained
                if a["token_ids"] == answer["token_ids"]
                and a["engine_logprobs"] == pytest.approx(answer["logprobs"], abs=1e-6)
                and tokenizer.decode(a["prompt"]) == prompt
            ]  # fmt: skip
            assert found, "it is trained after its prompt, and with its logprobs"
            trained.remove(found[0])


async def test_weights_change_in_the_middle_of_rollouts_and_every_token_has_its_version(run: Outcome) -> None:
    versions, differences = defaultdict(set), defaultdict(list)
    for row in run.record.table("tokens").to_pylist():
        for answer in trained_answers([row]):
            versions[row["sample_id"]].update(answer["versions"])
            if len(set(answer["versions"])) == 1:
                age = answer["step"] - answer["versions"][0]
                differences[age] += list(np.subtract(answer["trainer_logprobs"], answer["engine_logprobs"]))
    assert sum(len(of_sample) > 1 for of_sample in versions.values()) > 10
    assert np.abs(differences[0]).max() < 1e-4, "the trainer has the version with which they were sampled"
    assert np.abs(differences[1]).mean() > 1e-4, "and other versions differ"
