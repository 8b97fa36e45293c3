"""Training on the CPU with Ray, vLLM, two FSDP2 ranks and in-flight weight updates."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import pytest_asyncio
from tests.e2e.stack.conftest import LongRun, Outcome, Stack, evaluation_on
from tests.unit.orchestrator.fakes import StrictRecorder

from telescope.orchestrator.checkpoints import CheckpointFolder
from telescope.orchestrator.status import RunStatus

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


async def test_reward_and_held_out_accuracy_rise(stack: Stack, long_run: LongRun) -> None:
    before, after = long_run.before.accuracy, long_run.after.accuracy
    assert after > before + 0.08, f"held-out accuracy went from {before} to {after}"
    rewards = [row["reward_mean"] for row in long_run.outcome.steps()]
    assert sum(rewards[-10:]) > sum(rewards[:10])
    assert long_run.outcome.orchestrator.ledger.is_balanced()
    probe = stack.parts.weights.last_probe[0]
    assert probe.ok, str(probe)


async def test_asynchronous_mode_records_the_version_of_each_token(stack: Stack) -> None:
    run = await stack.run(number_of_steps=5, max_async_rollout=2, record_tokens="all")
    rows = run.record.table("tokens").to_pylist()
    lists = ("token_ids", "engine_logprobs", "trainer_logprobs", "entropies", "versions", "trained")
    assert all(len({len(row[name]) for name in lists}) == 1 for row in rows)
    assert {row["sample_id"] for row in rows} == {
        sample["sample_id"] for sample in run.samples() if sample["num_turns"]
    }
    seen = {version for row in rows for version in row["versions"]} - {-1}
    assert min(seen) == 0
    assert max(seen) > 0
    assert all(0 <= sample["age"] <= 3 for sample in run.samples(status="kept"))


NUM_SYNCHRONOUS_STEPS = 3
SYNCHRONOUS = {"number_of_steps": NUM_SYNCHRONOUS_STEPS, "max_async_rollout": 0, "seed": 11}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def synchronous_runs(stack: Stack) -> list[Outcome]:
    """Two with one seed; the first writes a checkpoint after every step."""
    return [await stack.run(**SYNCHRONOUS, checkpoint_every=every, checkpoint_keep_last=None) for every in (1, 0)]


async def test_the_first_step_is_on_policy_up_to_rounding(synchronous_runs: list[Outcome]) -> None:
    assert 0 <= synchronous_runs[0].steps()[0]["metrics"]["kl_divergence_inference"] < 1e-6


async def test_synchronous_mode_samples_every_token_with_the_newest_weights(synchronous_runs: list[Outcome]) -> None:
    samples = synchronous_runs[0].samples(status="kept")
    for sample in samples:
        assert sample["start_version"] == sample["end_version"] == sample["step"]
    assert len(samples) == NUM_SYNCHRONOUS_STEPS * 16 * 8


async def test_two_synchronous_runs_with_one_seed_give_the_same_samples_and_losses(
    synchronous_runs: list[Outcome],
) -> None:
    runs = synchronous_runs
    texts = [sorted((s["sample_id"], s["completion_text"], s["reward"]) for s in run.samples()) for run in runs]
    assert texts[0] == texts[1]
    for name in ("grad_norm", "entropy", "kl_divergence_inference", "reward/total/mean"):
        first, second = ([row["metrics"][name] for row in run.steps()] for run in runs)
        assert first == pytest.approx(second, rel=1e-5, abs=1e-9), name


async def test_a_run_resumed_after_one_step_samples_and_trains_as_one_that_was_not_interrupted(
    stack: Stack, synchronous_runs: list[Outcome]
) -> None:
    straight = synchronous_runs[0]
    folder = CheckpointFolder(straight.record.files.checkpoints)
    assert folder.steps() == [1, 2, 3]
    resumed = await stack.run(checkpoint=folder.load(1), **SYNCHRONOUS)
    runs = [resumed, straight]
    texts = [sorted((s["sample_id"], s["completion_text"]) for s in run.samples() if s["step"] > 0) for run in runs]
    assert texts[0] == texts[1]
    steps = [{row["step"]: row["metrics"] for row in run.steps()} for run in runs]
    assert sorted(steps[0]) == [1, 2]
    for step in (1, 2):
        for name in ("grad_norm", "entropy", "loss/policy", "learning_rate", "reward/total/mean"):
            assert steps[0][step][name] == pytest.approx(steps[1][step][name], rel=1e-5, abs=1e-9), (step, name)
    assert resumed.orchestrator.ledger.num_trained == straight.orchestrator.ledger.num_trained
    assert resumed.orchestrator.position() == straight.orchestrator.position()


async def test_an_eval_keeps_its_policy_version_while_training_goes_on(stack: Stack) -> None:
    parts, recorder = stack.parts, StrictRecorder()
    await parts.trainer.restart()
    await parts.weights.sync()
    directory: Any = SimpleNamespace(recorder=recorder)
    pass_k = {"at_k": {"metrics": ["correct"], "k": [4]}}  # 2,000 samples, which take longer than a step
    plans = [replace(parts.evals[0], pass_k=pass_k)]
    evaluation = evaluation_on(parts, plans, directory, RunStatus("eval", 1))
    running = asyncio.create_task(evaluation.run_all(0))
    outcome = await stack.run(number_of_steps=4, max_off_policy_steps=-1)
    (result,) = await running
    syncs = [row["metrics"]["weight_sync/servers"] for row in outcome.steps()]
    assert syncs[0] == 0.0, f"the server of a running eval receives no weights; {result.seconds:.1f} s"
    assert parts.trainer.version == len(syncs) == 4, "and training does not wait for it"
    rows = recorder.of("samples", eval_name="countdown")
    assert len(rows) == result.num_scored == 2_000
    assert {(row["start_version"], row["end_version"]) for row in rows} == {(0, 0)}
    await parts.weights.sync()
    assert parts.servers.clients[0].loaded_version == 4, "it is in the next sync"


@pytest.mark.slow
async def test_an_engine_that_hangs_comes_back_with_the_current_weights_and_the_run_completes(stack: Stack) -> None:
    before = await stack.parts.inference.handles[0].status()

    def strike() -> None:
        os.kill(engine_of(before.pid), signal.SIGSTOP)

    run = await stack.run(number_of_steps=8, timeout=400, after_steps=[(3, 0.0, strike)])
    status = await stack.parts.inference.handles[0].status()
    assert status.restarts == before.restarts + 1
    assert "is running but has not responded" in (status.error or "")
    assert len(run.steps()) == 8
    assert run.orchestrator.ledger.is_balanced()
    assert run.status.num_masked_samples == 0
    assert stack.parts.weights.last_probe[0].ok


def engine_of(server: int) -> int:
    """The process that computes, which is not the one that speaks HTTP."""
    children = psutil.Process(server).children(recursive=True)
    (pid,) = [child.pid for child in children if "EngineCore" in " ".join(child.cmdline())]
    return pid
