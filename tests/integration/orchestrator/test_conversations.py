"""Conversations through the real loops and environments, against a fake engine."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.engine import FakeEngineSettings
from tests.integration.orchestrator.harness import Harness, harness
from transformers import AutoTokenizer

from telescope.record.reader import Run

pytestmark = pytest.mark.asyncio(loop_scope="session")

SLOW = FakeEngineSettings(mean_tokens=12, length_sigma=0.6, tokens_per_second=400, vocabulary=300, end_token=None)
ROUNDS: dict[str, Any] = {"environments": [{"name": "rounds"}], "max_model_len": 512, "max_tokens": 32}


def turns_of(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    rows = defaultdict(list)
    for row in sorted(Run(run_dir).table("turns").to_pylist(), key=lambda row: row["turn"]):
        rows[row["sample_id"]].append(row)
    return rows


def trained(run: Harness) -> dict[str, tuple[list[int], list[int]]]:
    """Ids of every sample that was trained, and those of them that had been sampled."""
    samples = {}
    for inputs in run.trainer.steps:
        for batch in (b for rank in inputs for m in rank.minibatches for b in m.micro_batches):
            for position, sample_id in enumerate(batch.sample_ids):
                of_sample = batch.sample_index_T == position
                ids = batch.token_ids_T[of_sample]
                samples[sample_id] = (ids.tolist(), ids[batch.trained_T[of_sample]].tolist())
    return samples


async def test_the_trained_tokens_are_those_of_the_conversation(ground, tmp_path):
    async with harness(ground, tmp_path, **ROUNDS) as run:
        await run.run()
        batches = trained(run)
    tokenizer = AutoTokenizer.from_pretrained(ground.tokenizer)
    turns = turns_of(tmp_path)
    kept = [row for row in Run(tmp_path).table("samples").to_pylist() if row["status"] == "kept"]
    assert set(batches) == {row["sample_id"] for row in kept}
    for row in kept:
        conversation = turns[row["sample_id"]]
        assert [turn["role"] for turn in conversation] == ["assistant", "user", "assistant", "user", "assistant"]
        assert [turn["text"] for turn in conversation if turn["role"] == "user"] == ["round 1", "round 2"]
        ids, sampled = batches[row["sample_id"]]
        ends = np.cumsum([row["prompt_tokens"], *(turn["num_tokens"] for turn in conversation)])
        parts = [ids[begin:end] for begin, end in pairwise(ends)]
        assert ends[-1] == len(ids)
        assert sampled == [
            token
            for turn, part in zip(conversation, parts, strict=True)
            if turn["role"] == "assistant"
            for token in part
        ]
        for part, turn in zip(parts[::2], conversation[::2], strict=True):
            # A special token that ended an answer is trained, and is no part of its text.
            assert turn["text"] in (tokenizer.decode(part), tokenizer.decode(part[:-1]))
        assert row["completion_tokens"] == len(sampled)
        assert row["environment_tokens"] == len(ids) - len(sampled) - row["prompt_tokens"]


async def test_without_interleaving_every_turn_is_a_sample_with_the_advantage_of_the_whole(ground, tmp_path):
    async with harness(ground, tmp_path, interleaved_rollouts=False, **ROUNDS) as run:
        await run.run()
        steps = run.trainer.steps
    parts: dict[str, set[float]] = defaultdict(set)
    names = set()
    for batch in (b for inputs in steps for rank in inputs for m in rank.minibatches for b in m.micro_batches):
        for position, sample_id in enumerate(batch.sample_ids):
            names.add(sample_id)
            of_sample = (batch.sample_index_T == position) & batch.trained_T
            parts[sample_id.split("/")[0]] |= set(np.unique(batch.advantage_T[of_sample]).tolist())
    kept = {row["sample_id"] for row in Run(tmp_path).table("samples").to_pylist() if row["status"] == "kept"}
    assert names == {f"{sample_id}/{turn}" for sample_id in kept for turn in range(3)}
    assert all(len(values) == 1 for values in parts.values())


async def test_a_conversation_that_runs_out_of_context_is_scored_as_far_as_it_went(ground, tmp_path):
    rounds = {**ROUNDS, "environments": [{"name": "rounds", "kwargs": {"max_turns": 50}}], "max_model_len": 160}
    async with harness(ground, tmp_path, **rounds) as run:
        await run.run()
        assert run.status.num_masked_samples == 0
        assert max(len(ids) for ids, _ in trained(run).values()) <= 160
    rows = [row for row in Run(tmp_path).table("samples").to_pylist() if row["status"] == "kept"]
    assert {row["stop_reason"] for row in rows} <= {"context_exhausted", "length"}
    assert all(1 < row["num_turns"] < 50 for row in rows)


async def test_evals_of_conversations_run_beside_training_at_one_version_each(ground, tmp_path):
    evals = [{"name": "rounds", "eval_every": 1, "kwargs": {"max_turns": 6}}]  # longer than a training step
    servers = {"inference_num_workers": 2, "eval_num_servers": 1, "number_of_steps": 10}
    async with harness(ground, tmp_path, engine=SLOW, evals=evals, record_tokens="all", **servers, **ROUNDS) as run:
        await run.run()
    record = Run(tmp_path)
    assert record.table("steps").num_rows == 10
    rows = record.table("evals").to_pylist()
    finished = [row for row in rows if row["status"] == "finished"]
    assert finished and any(row["status"] == "skipped" for row in rows)
    links = record.table("eval_samples").to_pylist()
    samples = {row["sample_id"]: row for row in record.table("samples").to_pylist()}
    tokens = {row["sample_id"]: row for row in record.table("tokens").to_pylist()}
    turns = turns_of(tmp_path)
    for row in finished:
        of_eval = [link["sample_id"] for link in links if link["eval_id"] == row["eval_id"]]
        assert len(of_eval) == row["num_scored"] == 64
        conversation = [turn for sample_id in of_eval for turn in turns[sample_id] if turn["role"] == "assistant"]
        assert len(conversation) == 64 * 6
        versions = {version for sample_id in of_eval for version in tokens[sample_id]["versions"]}
        assert versions == {-1, row["version"]}
    assert {row["server"] for row in samples.values() if row["eval_name"]} == {1}
    assert {row["server"] for row in samples.values() if not row["eval_name"] and row["status"] == "kept"} == {0}
