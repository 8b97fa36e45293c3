"""Runs of earlier versions have the conversations that this version records."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import group, sample

from telescope.dashboard.store import RunStore
from telescope.environments.types import PreparedPrompt
from telescope.orchestrator import record_rows
from telescope.record.earlier import prompt_messages
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.rollout import sample_rows
from telescope.rollout.trajectory import Trajectory

Row = dict[str, Any]
KEY = (1, "5-0")


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n",
         [("system", "Be short."), ("user", "2 + 3?")]),
        ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n", [("user", "Hi")]),
        ("<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", [("user", "Hi")]),
        ("notes <|im_start|>user\nHi<|im_end|>", [("prompt", "notes "), ("user", "Hi")]),
        ("2 + 3 =", [("prompt", "2 + 3 =")]),
        ("", []),
    ],
)  # fmt: skip
def test_a_prompt_is_split_into_the_messages_of_its_template(prompt: str, messages: list[tuple[str, str]]) -> None:
    assert [(one["role"], one["content"]) for one in prompt_messages(prompt)] == messages


def some_conversation(seed: int) -> tuple[list[Row], str, Trajectory]:
    """Returns the messages of a prompt, the prompt as rendered, and a sample with calls of tools."""
    chosen = random.Random(seed)
    messages = [{"role": role, "content": f"{role} {seed}"} for role in chosen.choice([("user",), ("system", "user")])]
    rendered = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    made = sample(0, 1.0, lengths=(2,) * chosen.randint(1, 4))
    for number, (turn, following) in enumerate(zip(made.turns, made.turns[1:], strict=False)):
        results = [f"result {number}.{call}" for call in range(chosen.randint(0, 3))]
        turn.text = f"answer {number}"
        call: Row = {"name": "add", "arguments": "{}", "error": None, "seconds": 0.1}
        turn.tool_calls = [{**call, "result": result} for result in results]
        following.replies = [("tool", result, "tool_result") for result in results] or [("user", "Go on.")]
        if len(results) > 1 and chosen.random() < 0.5:
            lines = "\n".join(f"Tool {i}: {result}" for i, result in enumerate(results, 1))
            following.replies = [("user", lines, "tool_result")]
    return messages, f"{rendered}<|im_start|>assistant\n", made


def conversation(folder: Path, made: Trajectory, prompt: PreparedPrompt, *, earlier: bool) -> Row:
    """Records a sample and reads it. `earlier`: as versions did that had the texts in `samples`."""
    prompt_row = record_rows.prompt_row(made.environment, prompt)
    row = record_rows.sample_row(made, prompt_row["prompt_key"], status="kept", reason=None, step=0)
    calls, turns = sample_rows.tool_call_rows(made), sample_rows.turn_rows(made)
    with Recorder(folder) as recorder:
        if earlier:
            del row["prompt_key"]
            row |= {"prompt_text": prompt.text, "completion_text": "\n".join(turn.text for turn in made.turns)}
            calls = [{**call, "reply": None} for call in calls]
        else:
            recorder.write("prompts", prompt_row)
        for table, rows in (("turns", turns), ("tool_calls", calls), ("samples", [row])):
            for one in rows:
                recorder.write(table, one)
    (texts,) = Run(folder).sql("select prompt_key, prompt_text, completion_text from samples").rows
    found = RunStore(Run(folder)).conversations([KEY])[KEY]
    said = [{name: turn[name] for name in ("turn", "role", "text", "num_tokens")} for turn in found["turns"]]
    whole = {name: found[name] for name in ("messages", "prompt_key", "prompt_text", "tool_calls", "info")}
    return {**whole, "turns": said, "texts": texts}


@pytest.mark.parametrize("seed", range(12))
def test_a_run_of_an_earlier_version_has_the_same_conversation(tmp_path: Path, seed: int) -> None:
    messages, rendered, made = some_conversation(seed)
    prompt = PreparedPrompt([], rendered, messages, "uid")
    new, old = (conversation(tmp_path / str(earlier), made, prompt, earlier=earlier) for earlier in (False, True))
    assert new == old
    assert new["messages"] == messages and new["texts"][1:] == (rendered, "\n".join(turn.text for turn in made.turns))


def test_the_result_of_a_call_is_the_turn_that_gave_it_to_the_model() -> None:
    _, _, made = some_conversation(5)
    made.turns = [sample(0, 1.0, lengths=(2,)).turns[0] for _ in range(4)]
    one, two, three, last = made.turns
    call: Row = {"name": "add", "arguments": "{}", "result": "3", "error": None, "seconds": None}
    one.tool_calls, two.tool_calls, three.tool_calls, last.tool_calls = [call] * 2, [call] * 2, [call], [call]
    two.replies = [("user", "By the way"), ("tool", "3"), ("tool", "3")]
    three.replies = [("user", "Tool 1: 3\nTool 2: 3", "tool_result")]
    last.replies = [("user", "Guess.")]
    rows = sample_rows.tool_call_rows(made)
    assert [(row["turn"], row["reply"]) for row in rows] == [(0, 2), (0, 3), (1, 5), (1, 5), (2, None), (3, None)]
    roles = {row["turn"]: row["role"] for row in sample_rows.turn_rows(made)}
    assert [roles[row["reply"]] for row in rows[:4]] == ["tool", "tool", "user", "user"]


def test_a_sample_whose_turns_an_earlier_version_dropped_shows_its_answer(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        texts = {"prompt_text": "2 + 3 =", "completion_text": "5"}
        recorder.write("samples", {"sample_id": "5-0", "step": 0, "environment": "sums", **texts})
    found = RunStore(Run(tmp_path)).conversations([KEY])[KEY]
    assert [(turn["role"], turn["text"]) for turn in found["turns"]] == [("assistant", "5")]
    assert Run(tmp_path).sql("select text from prompts").rows == [("2 + 3 =",)]


def test_a_prompt_is_recorded_once_an_attempt(tmp_path: Path) -> None:
    made = group([1.0, 0.0])
    for attempt in (1, 2):
        with Recorder(tmp_path, attempt=attempt) as recorder:
            for _ in range(2):
                recorder.write("prompts", record_rows.prompt_row("sums", made.prompt))
    assert Run(tmp_path).table("prompts")["attempt"].to_pylist() == [1, 2]
