"""Implements `telescope envs check`, which prints an environment's trials and a judge's agreement with labels."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from telescope.cluster.reaper import Reaper
from telescope.environments.grading import agreement
from telescope.environments.judge import Judge
from telescope.environments.local_rollout import ChatServer
from telescope.environments.types import EnvironmentSpec
from telescope.errors import InfrastructureError, RunError, UserError
from telescope.rollout.check import CANNED, MODEL, REFERENCE, Checks, Trial
from telescope.rollout.rendering import Renderer, RendererSpec
from telescope.rollout.sample_rows import info_rows
from telescope.utils.text import plain, pluralize

SHOWN_CHARACTERS, LINE_CHARACTERS, OUTPUT_CHARACTERS = 60, 200, 2000


def check(arguments: argparse.Namespace, kwargs: dict[str, Any]) -> int:
    """Runs the trials. Returns the exit status: 1 if the solution fails, or a cheat is rewarded or not checked."""
    if arguments.url and not arguments.model:
        raise UserError("--url needs the tokenizer of the served model: give its folder with --model.")
    server = ChatServer(arguments.url) if arguments.url else None
    spec = EnvironmentSpec(arguments.name, kwargs)
    checks = Checks(spec, _renderer(arguments.model), arguments.path, server=server, form=arguments.solution)
    labels = _read_labels(arguments.labels, checks.environment.judge) if arguments.labels else []
    count = checks.info.num_samples
    items = list(range(0, count, -(-count // arguments.samples)))
    with Reaper():  # removes temporary files also if a blocked event loop ends this process
        trials = asyncio.run(checks.run(items))
    console = Console(highlight=False, width=LINE_CHARACTERS)
    for trial in trials:
        if trial.name in (REFERENCE, CANNED, MODEL):
            console.print(_tree(trial))
    console.print(_table(trials))
    if any(trial.name == CANNED for trial in trials):
        print("No solution is known. Return one from `solution(self, sample)`, or give one (--solution), to check it.")
    failed: dict[str, list[str]] = {}  # names of trials by their problem, since a bug fails all of them
    for trial in trials:
        if problem := _without_item(trial.problem, spec, trial):
            failed.setdefault(problem, []).append(f"{trial.name}, item {trial.item}")
    for name in sorted(_unchecked(trials)):
        trial = next(trial for trial in trials if trial.name == name)
        why = _without_item(trial.trajectory.failure_message, spec, trial)
        masked = f"not checked, because each of its samples was masked: {why}"
        failed.setdefault(why if why in failed else masked, []).append(name)
    problems = []
    for problem, (first, *others) in failed.items():
        more = f" and {pluralize(len(others), 'other trial')}" if others else ""
        problems.append(f"{first}{more}: {problem.removesuffix('.')}.")
    if labels:
        problems += _judge_labels(labels, checks.environment.judge)
    for problem in problems:
        print(f"{arguments.name}: {problem}", file=sys.stderr)
    return int(bool(problems))


def _without_item(problem: str | None, spec: EnvironmentSpec, trial: Trial) -> str:
    """Returns a problem without its item and rollout, so that the same problem of several items is reported once."""
    item, rollout = f"environment {spec.identity!r}, item {trial.item}", f", rollout {trial.trajectory.sample_id!r}"
    return (problem or "").removeprefix(item).removeprefix(rollout).removeprefix(": ")


def _read_labels(file: Path, judge: Judge | None) -> list[dict[str, Any]]:
    if judge is None:
        raise UserError("--labels is for a judge. Give one: --set 'judge={url: ..., model: ...}'.")
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [
            {"question": row.get("prompt"), **row, "label": float(row["label"]), "answer": row["answer"]}
            for row in rows
        ]
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        form = '{"prompt": "...", "answer": "...", "label": 1}'
        raise UserError(f"--labels: {file} cannot be read ({error!r}). Write lines of the form {form}.") from error


def _judge_labels(rows: list[dict[str, Any]], judge: Judge | None) -> list[str]:
    """Prints the judge's agreement with labels. Returns its problems."""
    assert judge is not None

    async def judged() -> tuple[float, float]:
        try:
            return await agreement(judge, rows)
        finally:
            await judge.close()

    try:
        share, kappa = asyncio.run(judged())
    except InfrastructureError as error:
        raise RunError(str(error)) from error
    print(f"The judge agrees with {share:.1%} of {pluralize(len(rows), 'label')} (Cohen's kappa {kappa:.2f}).")
    return (
        [] if kappa > 0 else ["the judge agrees with the labels no more than chance does. Change it, or its criteria."]
    )


def _renderer(model: str | None) -> Renderer:
    if model is not None:
        return Renderer(RendererSpec(model))
    from telescope.tiny_model.build import build_tokenizer

    return Renderer(RendererSpec("a tokenizer of bytes"), build_tokenizer([], 384))


def _tree(trial: Trial) -> Tree:
    """Returns the calls of a rollout as a tree. A fork is below the call that it leaves.

    A rollout with a problem also has the results of its tools, and its tags and notes (`info_turns`).
    """
    sample = trial.trajectory
    seconds, calls = sample.finished_at - sample.started_at, pluralize(len(sample.turns), "call")
    outcome = f"reward {_shown(trial.reward)}, {calls}, {sample.totals.num_tokens} tokens, {seconds:.2f} s"
    top = Tree(Text(f"item {trial.item}, {trial.name}: {outcome}", style="bold"))
    trees: list[tuple[Tree, Tree]] = []  # the tree that contains each call, and the call's own tree
    followed: dict[int | None, bool] = {}
    for number, turn in enumerate(sample.turns):
        line = Text(f"call {number + 1}{f' ({turn.chat})' if turn.chat else ''}: ")
        line.append(f"fork, {turn.divergence}: " if turn.divergence else "", style="yellow")
        cut = " (cut off)" if turn.generation.finish_reason == "length" else ""
        line.append(f"+{len(turn.added_token_ids)} tokens, sampled {len(turn.generation.token_ids_N)}{cut}, ")
        line.append(f"{turn.ended_at - turn.started_at:.2f} s: {turn.text[:SHOWN_CHARACTERS]!r}")
        at = top if turn.parent is None else trees[turn.parent][followed.get(turn.parent, False)]
        followed[turn.parent] = turn.parent is not None
        trees.append((at, at.add(line)))
        for call in turn.tool_calls if trial.problem else ():
            trees[-1][1].add(_output(call["error"] or call["result"] or ""))
    if sample.reward is not None and sample.reward.sample_metrics:
        metrics = (f"{name} {value:.4g}" for name, value in sample.reward.sample_metrics.items())
        top.add(Text(f"metrics: {', '.join(metrics)}"))
    if trial.problem and sample.reward is not None:
        for name, value in sample.reward.sample_tags.items():
            top.add(_output(f"{name}: {value}"))
        for note in info_rows(sample):
            top.add(_output(f"{note['key']}: {note['value']}"))
    return top


def _output(text: str) -> Text:
    """Returns the end of an output, where tests and commands say what failed."""
    shown = plain(text).strip()
    return Text(f"... {shown[-OUTPUT_CHARACTERS:]}" if len(shown) > OUTPUT_CHARACTERS else shown)


def _unchecked(trials: list[Trial]) -> set[str]:
    """Returns the names of cheats that no reward was computed for."""
    return {trial.name for trial in trials} - {t.name for t in trials if t.reward is not None or t.problem}


def _table(trials: list[Trial]) -> Table:
    table, unchecked = Table("answer", "reward", "", box=None, pad_edge=False), _unchecked(trials)
    for name in dict.fromkeys(trial.name for trial in trials):
        named = [trial for trial in trials if trial.name == name]
        rewards = dict.fromkeys(_shown(trial.reward) for trial in named)
        verdict = Text("FAILED", style="red") if any(trial.problem for trial in named) else Text("ok", style="green")
        if name in unchecked:
            verdict = Text("not checked", style="red")
        table.add_row(name, ", ".join(rewards), verdict)
    return table


def _shown(reward: float | None) -> str:
    return "none (masked)" if reward is None else f"{reward:.4g}"
