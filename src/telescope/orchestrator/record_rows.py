"""Converts orchestrator objects to rows of the record's tables.

Pure functions; `record/tables.toml` describes the columns. A sample is written once, when its outcome is final.
"""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from telescope.environments.types import EnvironmentInfo, PreparedPrompt
from telescope.evals.runner import EvalItem, EvalResult, PlannedEval
from telescope.orchestrator.groups import Group
from telescope.record.convert import Batch
from telescope.record.tables import PROMPT_KEY_DIGITS
from telescope.rollout.trajectory import Trajectory
from telescope.trainer.batch import SampleTokens
from telescope.utils.timeline import Span

MAX_FAILURE_MESSAGE = 4000  # longest recorded failure message; user code may raise messages of any length


def environment_row(key: str, name: str, weight: float | None, info: EnvironmentInfo) -> dict[str, Any]:
    """Returns one row of `environments`. A `weight` of None marks an eval."""
    return {
        "key": key,
        "name": name,
        "purpose": "eval" if weight is None else "training",
        "weight": weight,
        "num_samples": info.num_samples,
        "is_multi_turn": info.is_multi_turn,
        "reward_min": info.reward_min,
        "reward_max": info.reward_max,
        "metrics_ranges": json.dumps(info.metrics_ranges),
        "tags_options": json.dumps(info.tags_options),
    }


def group_row(group: Group, *, status: str, reason: str | None, step: int | None) -> dict[str, Any]:
    """Returns one row of `groups`."""
    rewards_n = group.rewards_n
    return {
        "group_id": group.group_id,
        "environment": group.environment,
        "index": group.sampled_prompt.index,
        "status": status,
        "reason": reason,
        "step": step,
        "start_version": group.start_version,
        "num_samples": len(rewards_n),
        "reward_mean": float(rewards_n.mean()) if len(rewards_n) else None,
        "reward_std": float(rewards_n.std(ddof=1)) if len(rewards_n) > 1 else None,
        "opened_at": group.opened_at,
        "finished_at": group.finished_at,
        "num_returns": group.num_requeues,
    }


def prompt_row(environment: str, prompt: PreparedPrompt) -> dict[str, Any]:
    """Returns one row of `prompts`."""
    digest = hashlib.md5(f"{environment}\n{prompt.text}".encode(errors="replace"), usedforsecurity=False)
    messages = [
        {**message, "content": content if isinstance(content, str | None) else json.dumps(content)}
        for message in prompt.messages
        for content in [message.get("content")]
    ]
    return {
        "prompt_key": digest.hexdigest()[:PROMPT_KEY_DIGITS],
        "environment": environment,
        "text": prompt.text,
        "messages": json.dumps(messages, ensure_ascii=False),
    }


def sample_row(
    sample: Trajectory,
    prompt_key: str,
    *,
    status: str,
    reason: str | None,
    step: int | None,
    advantage: float | None = None,
    age: int | None = None,
    eval_name: str | None = None,
) -> dict[str, Any]:
    """Returns one row of `samples`. A masked or cancelled sample has its own status instead of its group's."""
    totals, reward = sample.totals, sample.reward
    start_version, end_version = totals.version_range
    own_status = "cancelled" if sample.cancelled else None if sample.is_usable else "masked"
    return {
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "sample_index": sample.sample_index,
        "environment": sample.environment,
        "status": own_status or status,
        "reason": sample.mask_reason if own_status == "masked" else reason,
        "step": step,
        "reward": reward.total_reward if reward is not None else None,
        "advantage": advantage,
        "prompt_key": prompt_key,
        "golden": {k: v or "" for k, v in reward.golden_answers.items()} if reward is not None else {},
        "metrics": dict(reward.sample_metrics) if reward is not None else {},
        "tags": dict(reward.sample_tags) if reward is not None else {},
        "stop_reason": sample.stop_reason,
        "num_turns": totals.num_turns,
        "prompt_tokens": totals.num_prompt_tokens,
        "completion_tokens": totals.num_completion_tokens,
        "start_version": start_version,
        "end_version": end_version,
        "age": age,
        "server": sample.server_index,
        "lane": sample.slot,
        "started_at": sample.started_at,
        "generated_at": sample.generated_at or None,
        "finished_at": sample.finished_at,
        "failure_kind": sample.failure_kind,
        "failure_message": sample.failure_message and sample.failure_message[:MAX_FAILURE_MESSAGE],
        "eval_name": eval_name,
        "penalty": sample.penalty if reward is not None else None,
        "environment_tokens": totals.num_environment_tokens,
        "divergences": {name: float(count) for name, count in totals.divergences.items()},
        "num_retries": sample.num_infrastructure_retries,
        "wasted_tokens": sample.num_sampled_tokens - totals.num_completion_tokens,
        "total_tokens": totals.num_tokens,
    }


def in_flight_rows(group: Group) -> list[dict[str, Any]]:
    """Returns rows of `samples` for running samples, without prompts, and without a server until they have a slot."""
    done = {sample.sample_index for sample in group.samples}
    running = group.running.samples if group.running is not None else {}
    rows = []
    for index in sorted(set(range(group.size)) - done):
        row: dict[str, Any] = {
            "sample_id": group.sample_id(index),
            "group_id": group.group_id,
            "sample_index": index,
            "environment": group.environment,
            "start_version": group.start_version,
            "prompt_tokens": len(group.prompt.token_ids),
            "started_at": group.opened_at,
        }
        if index in running and (sample := running[index]).server >= 0:
            row |= {"server": sample.server, "lane": sample.slot, "started_at": sample.started_at}
        rows.append(row)
    return rows


def eval_row(
    plan: PlannedEval,
    version: int,
    started_at: float,
    result: EvalResult | None = None,
    *,
    status: str = "finished",
    error: str | None = None,
    servers: Iterable[int] = (),
) -> dict[str, Any]:
    """Returns one row of `evals` for an eval that ended now. Without a `result`, `error` gives the reason."""
    row: dict[str, Any] = {
        "eval_id": plan.id_at(version),
        "name": plan.name,
        "number": plan.number,
        "source": "standalone" if plan.session else "live",
        "status": status,
        "error": error and error[:MAX_FAILURE_MESSAGE],
        "step": version - 1,
        "version": version,
        "started_at": started_at,
        "ended_at": time.time(),
        "num_items": len(plan.items),
        "num_completions": plan.num_completions,
        "temperature": plan.sampling.temperature,
        "top_p": plan.sampling.top_p,
        "max_tokens": plan.sampling.max_tokens,
        "held_out": plan.held_out,
        "servers": sorted(servers),
    }
    if result is not None:
        row |= {
            "num_scored": result.num_scored,
            "metric": result.metric,
            "accuracy": result.accuracy,
            "metrics": dict(result.metrics),
        }
        for name, estimate in (("accuracy", result.estimate), ("gain", result.gain)):
            if estimate is not None:
                row |= {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return row


def rows_of_eval_sample(
    plan: PlannedEval, version: int, item: EvalItem, sample: Trajectory, prompt_key: str, *, tokens: bool = False
) -> list[tuple[str, dict[str, Any] | Batch]]:
    """Returns an eval sample's rows with their tables, the sample last. `tokens` adds `untrained_tokens_rows`."""
    step = version - 1
    link = {
        "eval_id": plan.id_at(version),
        "sample_id": sample.sample_id,
        "step": step,
        "item": item.index,
        "completion": sample.sample_index,
        "sample_uid": item.prompt.sample_uid,
    }
    row = sample_row(sample, prompt_key, status="eval", reason=None, step=step, eval_name=plan.name)
    numbers = [("tokens", row) for row in untrained_tokens_rows(sample, step)] if tokens else []
    return [*sample.rows.items(), *numbers, ("samples", row), ("eval_samples", link)]


def tokens_row(tokens: SampleTokens, step: int | None) -> dict[str, Any]:
    """Returns one row of `tokens`."""
    sample_id, _, part = tokens.sample_id.partition("/")  # see `Trajectory.sequences`
    return {
        "sample_id": sample_id,
        "part": int(part or 0),
        "step": step,
        "token_ids": tokens.token_ids_L.astype(np.int32),
        "trained": tokens.trained_L,
        "engine_logprobs": tokens.engine_logprob_L.astype(np.float32),
        "trainer_logprobs": tokens.trainer_logprob_L,
        "entropies": tokens.entropy_L,
        "versions": tokens.version_L,
    }


def untrained_tokens_rows(sample: Trajectory, step: int | None) -> list[dict[str, Any]]:
    """Returns the rows of `tokens` for an untrained sample, without the trainer's numbers."""
    rows = []
    for part in sample.sequences() if sample.totals.num_turns else ():
        nan_L = np.full(part.length, np.nan, dtype=np.float32)
        mask_L = np.zeros(part.length, dtype=bool)
        arrays = part.token_ids_L, mask_L, part.engine_logprob_L, part.version_L, nan_L, nan_L
        rows.append(tokens_row(SampleTokens(part.sample_id, *arrays), step))
    return rows


def trainer_span_row(span: Span, step: int | None) -> dict[str, Any]:
    """Returns one row of `spans` for a trainer rank's span."""
    return {**asdict(span), "component": "trainer", "step": step}
