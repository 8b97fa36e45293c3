"""Converts orchestrator objects to rows of the record's tables.

Pure functions; `record/tables.toml` describes the columns. A sample is written once, when its outcome is final.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from telescope.environments.tool_env import TOOL_RESULT
from telescope.environments.types import EnvironmentInfo, PreparedPrompt
from telescope.evals.runner import EvalItem, EvalResult, PlannedEval
from telescope.orchestrator.groups import Group
from telescope.rollout.trajectory import Trajectory, Turn
from telescope.trainer.batch import SampleTokens
from telescope.utils.timeline import Span

MAX_FAILURE_MESSAGE = 4000  # longest recorded failure message; user code may raise one of any length
PROMPT_KEY_DIGITS = 12  # as `record.query.PROMPT_KEY` has them for runs of earlier versions


Interval = tuple[str, float, float, dict[str, str]]  # name, start and end of a span, and its own attributes


def environment_row(key: str, name: str, weight: float | None, info: EnvironmentInfo) -> dict[str, Any]:
    """Returns one row of `environments`; a `weight` of None marks an eval."""
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
        "not_extendable": info.not_extendable,
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
    """Returns one row of `samples`. A masked or cancelled sample keeps its own status, whatever its group's status."""
    start_version, end_version = sample.version_range
    reward = sample.reward
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
        "num_turns": len(sample.turns),
        "prompt_tokens": sample.num_prompt_tokens,
        "completion_tokens": sample.num_completion_tokens,
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
        "environment_tokens": sample.num_environment_tokens,
        "divergences": {name: float(count) for name, count in sample.divergences.items()},
        "num_retries": sample.num_infrastructure_retries,
        "wasted_tokens": sample.num_sampled_tokens - sample.num_completion_tokens,
        "total_tokens": sample.num_tokens,
    }


def in_flight_rows(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """Returns the running samples with columns of `samples`, without prompts, and without a server before a slot."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        done = {sample.sample_index for sample in group.samples}
        running = group.running.samples if group.running is not None else {}
        common = {
            "group_id": group.group_id,
            "environment": group.environment,
            "start_version": group.start_version,
            "prompt_tokens": len(group.prompt.token_ids),
            "started_at": group.opened_at,
        }
        for index in range(group.size):
            if index in done:
                continue
            row = {**common, "sample_id": group.sample_id(index), "sample_index": index}
            if index in running and (sample := running[index]).server >= 0:
                row |= {"server": sample.server, "lane": sample.slot, "started_at": sample.started_at}
            rows.append(row)
    return rows


def turn_rows(sample: Trajectory) -> list[dict[str, Any]]:
    """Returns the rows of `turns`: messages of model and environment in order."""
    rows: list[dict[str, Any]] = []

    def add(role: str, text: str, num_tokens: int, started_at: float, ended_at: float, **of_reply: Any) -> None:
        message = {"role": role, "text": text, "num_tokens": num_tokens, "started_at": started_at, "ended_at": ended_at}
        joined = {"turn_type": None, "restarts": None, "divergence": None} | of_reply
        rows.append({"sample_id": sample.sample_id, "turn": len(rows), **message, **joined})

    for index, turn in enumerate(sample.turns):
        asked_at = sample.turns[index - 1].ended_at if index else turn.started_at
        for number, (role, text, *turn_type) in enumerate(turn.replies):
            # Messages of one reply are tokenized together.
            added = turn.added_token_ids if number == 0 else []
            kind = (turn_type[0] or None) if turn_type else None
            of_reply = {"turn_type": kind, "restarts": turn.restarts, "divergence": turn.divergence}
            add(role, text, len(added), asked_at, turn.started_at, **of_reply)
        add("assistant", turn.text, len(turn.generation.token_ids_N), turn.started_at, turn.ended_at)
    return rows


def tool_call_rows(sample: Trajectory) -> list[dict[str, Any]]:
    """Returns the rows of `tool_calls`."""
    rows: list[dict[str, Any]] = []
    first = 0  # row of `turns` behind the answer
    for turn, (made, following) in enumerate(zip_longest(sample.turns, sample.turns[1:])):
        first += len(made.replies) + 1
        replies = _result_rows(following, first, len(made.tool_calls))
        for call, reply in zip(made.tool_calls, replies, strict=True):
            rows.append({"sample_id": sample.sample_id, "turn": turn, "call": len(rows), **call, "reply": reply})
    return rows


def _result_rows(following: Turn | None, first: int, num_calls: int) -> Sequence[int | None]:
    """Returns the row of `turns` with the result of each call: a message each, or one with all. `first` is the next."""
    replies = [] if following is None else following.replies
    rows = [first + i for i, reply in enumerate(replies) if reply[0] == "tool" or reply[2:] == (TOOL_RESULT,)]
    return rows if len(rows) == num_calls else (rows if len(rows) == 1 else [None]) * num_calls


def info_rows(sample: Trajectory) -> list[dict[str, Any]]:
    """Returns the rows of `info`: one per key of each note."""
    rows = []
    for number, note in enumerate(sample.reward.info_turns if sample.reward is not None else ()):
        values = dict(note) if isinstance(note, dict) else {"": note}
        where = "turn_order" if "info_key" in values else "turn"
        turn = values.pop(where) if isinstance(values.get(where), int) else number
        kind = None
        if "info_key" in values:
            kind = values.get("info_type") and str(values["info_type"])
            values = {str(values["info_key"]): values.get("info_value")}
        for key, value in values.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            row = {"sample_id": sample.sample_id, "number": number, "turn": turn, "key": key, "value": text}
            rows.append({**row, "type": kind})
    return rows


def detail_rows(sample: Trajectory) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows that belong to a sample, each with its table: `turns`, `tool_calls`, `info`."""
    for table, rows in (("turns", turn_rows), ("tool_calls", tool_call_rows), ("info", info_rows)):
        for row in rows(sample):
            yield table, row


def sample_span_rows(sample: Trajectory) -> list[dict[str, Any]]:
    """Returns the spans of a sample: of each turn, the generation and the environment's reply with its tool calls.

    The reply to the last turn is the reward. Durations of tool calls are measured, their starts are not: the calls of
    a turn are placed one after the other, or all at the start of the reply if they took longer than it in total.
    """
    rows = []
    for index, turn in enumerate(sample.turns):
        is_last = index == len(sample.turns) - 1
        replied_at = sample.finished_at if is_last else sample.turns[index + 1].started_at
        intervals: list[Interval] = [("generate", turn.started_at, turn.ended_at, {})]
        if replied_at > turn.ended_at:
            intervals += [("reward" if is_last else "environment", turn.ended_at, replied_at, {})]
            intervals += _tool_intervals(turn, replied_at)
        common = {"component": "rollout", "server": turn.server, "sample_id": sample.sample_id}
        place = {"turn": str(index), "lane": str(turn.slot)}
        for name, start, end, more in intervals:
            rows.append({**common, "name": name, "start": start, "end": end, "attributes": {**place, **more}})
    return rows


def _tool_intervals(turn: Turn, replied_at: float) -> Iterator[Interval]:
    calls = [(call["name"], call["seconds"]) for call in turn.tool_calls if call["seconds"]]
    one_by_one = sum(seconds for _, seconds in calls) <= replied_at - turn.ended_at
    start = turn.ended_at
    for name, seconds in calls:
        yield "tool", start, min(start + seconds, replied_at), {"tool": name}
        start += seconds if one_by_one else 0.0


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
    """Returns one row of `evals`, of an eval that ended now. Without a `result`, `error` is why."""
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
    plan: PlannedEval, version: int, item: EvalItem, sample: Trajectory, *, tokens: bool = False
) -> list[tuple[str, dict[str, Any]]]:
    """Returns the rows of an eval's sample with their tables, itself last. `tokens`: `untrained_tokens_rows` too."""
    step = version - 1
    link = {
        "eval_id": plan.id_at(version),
        "sample_id": sample.sample_id,
        "step": step,
        "item": item.index,
        "completion": sample.sample_index,
        "sample_uid": item.prompt.sample_uid,
    }
    prompt = prompt_row(sample.environment, item.prompt)
    row = sample_row(sample, prompt["prompt_key"], status="eval", reason=None, step=step, eval_name=plan.name)
    numbers = [("tokens", row) for row in untrained_tokens_rows(sample, step)] if tokens else []
    spans = [("spans", row) for row in sample_span_rows(sample)]
    return [*detail_rows(sample), *numbers, *spans, ("prompts", prompt), ("samples", row), ("eval_samples", link)]


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
    """Returns the rows of `tokens` of an untrained sample. They have no numbers of the trainer."""
    rows = []
    for part in sample.sequences() if sample.turns else ():
        nan_L = np.full(part.length, np.nan, dtype=np.float32)
        mask_L = np.zeros(part.length, dtype=bool)
        arrays = part.token_ids_L, mask_L, part.engine_logprob_L, part.version_L, nan_L, nan_L
        rows.append(tokens_row(SampleTokens(part.sample_id, *arrays), step))
    return rows


def trainer_span_row(span: Span, step: int | None) -> dict[str, Any]:
    """Returns one row of `spans` for a span of a trainer rank."""
    return {
        "name": span.name,
        "component": "trainer",
        "rank": span.rank,
        "step": step,
        "micro_batch": span.micro_batch,
        "start": span.start,
        "end": span.end,
    }
