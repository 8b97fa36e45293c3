"""The turns of an agent's sample are shown by conversations, each with why it begins."""

from typing import Any

import numpy as np
from rich.console import Console
from tests.unit.orchestrator.fakes import agent_sample, sample

from telescope.dashboard.conversations import conversations, paths
from telescope.dashboard.rollouts import add_tokens, assemble
from telescope.orchestrator import record_rows
from telescope.rollout import sample_rows
from telescope.rollout.trajectory import Trajectory
from telescope.tui.rollouts import draw_sample

AGENT = [
    ("main", 0, "2 calls, 4 answer tokens", [0, 1, 2, 5, 6]),
    ("main", 1, "branch after call 1 of main, 1 message as before, 1 call, 4 answer tokens", [8, 9]),
    ("judge", 1, "1 call, 2 answer tokens, not trained", [3, 4]),
    ("main", 0, "compaction, 1 message as before, 1 call, 5 answer tokens", [11, 12]),
]
"""Name, depth, description and turns of the conversations of `agent_sample`."""


def recorded(made: Trajectory) -> dict[str, Any]:
    """A sample as the store reads it."""
    row = record_rows.sample_row(made, "p", status="kept", reason=None, step=0)
    calls = [{"sandbox": None, **call} for call in sample_rows.tool_call_rows(made)]
    texts = {"completion_text": None, "messages": [{"role": "user", "content": "2 + 2?"}], "info": []}
    return {**row, **texts, "turns": sample_rows.turn_rows(made), "tool_calls": calls}


def test_a_conversation_has_its_name_its_cause_and_no_message_that_was_shown_before() -> None:
    shown = conversations(recorded(agent_sample())["turns"])
    assert [(one["name"], one["depth"], one["about"], one["turns"]) for one in shown] == AGENT


def test_a_message_that_another_chat_has_is_shown_again() -> None:
    made = agent_sample()
    made.turns[1].replies = made.turns[0].replies
    judge = conversations(recorded(made)["turns"])[2]
    assert judge["about"] == "1 call, 2 answer tokens, not trained" and len(judge["turns"]) == 3


def test_a_retry_that_ends_first_leaves_the_conversation_to_the_first_call() -> None:
    made = agent_sample()
    made.turns[2].divergence, made.turns[3].divergence = "retry", None
    main, retry, *_ = conversations(recorded(made)["turns"])
    assert (main["turns"], retry["about"].split(",")[0]) == ([0, 1, 2, 7, 8, 9], "retry after call 1 of main")


def test_a_conversation_with_an_environment_is_one_chain_also_where_it_restarts() -> None:
    made = sample(lengths=(1, 1, 1))
    made.turns[1].replies, made.turns[2].replies, made.turns[2].parent = [("user", "On.")], [("user", "On.")], None
    assert conversations(recorded(made)["turns"]) == []


def test_answers_recorded_without_parents_extend_the_one_before_unless_they_restart() -> None:
    made = sample(lengths=(1, 1, 1))
    made.turns[1].replies, made.turns[2].replies, made.turns[2].parent = [("user", "On.")], [("user", "On.")], None
    rows = recorded(made)["turns"]
    for known in (rows, [{**row, "parent": None} for row in rows]):
        assert [[turn["turn"] for turn in path] for path in paths(known)] == [[0, 2], [4]]


def test_each_answer_has_the_tokens_of_the_first_sequence_that_has_it() -> None:
    sequences = [
        {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}
        for row in record_rows.untrained_tokens_rows(agent_sample(), 0)
    ]
    turns = recorded(agent_sample())["turns"]
    add_tokens(turns, [row for row in sequences if row["part"] != 0])  # that of the judge is not trained
    shown = {turn["text"]: turn["token_ids"] for turn in turns if turn.get("token_ids")}
    assert shown == {"Adding.": [100], "It is 4.": [102] * 3, "Why not 5?": [103] * 4, "Done.": [104] * 5}


def test_the_terminal_view_indents_conversations_below_those_that_they_leave() -> None:
    console = Console(width=100, record=True)
    console.print(draw_sample(assemble(recorded(agent_sample()), [])))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    headings = [line for line in lines if "answer token" in line]
    assert headings == [f"{' ' * 4 * depth}{name}  {about}" for name, depth, about, _ in AGENT]
    assert lines.count("Be brief.") == 1 and "    Sure?" in lines and "  add {} → 4 (- s)" in lines
