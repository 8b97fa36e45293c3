"""Prompts with their pass rates, and the recorded tokens of answers, against the rows that were written."""

import math
from collections import Counter
from pathlib import Path

import pytest
from tests.unit.dashboard.conftest import NUM_STEPS, client_of, sample_rows, write_sample
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from telescope.dashboard import rollouts
from telescope.dashboard.rollouts import add_tokens, find_tokenizer, token_texts
from telescope.record.recorder import Recorder

RUN = "/api/runs/first"
ALL = [row for step in range(NUM_STEPS) for row in sample_rows(step)]


def test_a_prompt_has_the_pass_rate_of_its_answers_by_step(client):
    few = "tag=level%3D0&tag=level%3D1"
    chosen = [row for row in ALL if row["tags"]["level"] in "01"]
    body = client.get(f"{RUN}/prompts?limit=1000&{few}").json()
    expected = Counter((row["environment"], row["step"]) for row in chosen)
    right = Counter((row["environment"], row["step"]) for row in chosen if row["reward"] == 1)
    found = {(row["environment"], row["first_step"]): row for row in body["rows"]}
    assert {key: row["n"] for key, row in found.items()} == expected
    assert {key: row["num_right"] for key, row in found.items()} == {key: right[key] for key in expected}
    assert body["never"] == sum(not right[key] for key in expected) > 0
    assert body["total"] == body["never"] + body["sometimes"] + body["always"] == len(expected)
    never = client.get(f"{RUN}/prompts?mark=never&{few}&sort=-first_step").json()["rows"]
    assert [row["num_right"] for row in never] == [0] * body["never"]
    assert [row["first_step"] for row in never] == sorted((row["first_step"] for row in never), reverse=True)
    one = found["countdown", 4]
    assert (one["steps"], one["counts"], one["rights"]) == ([4], [4], [right["countdown", 4]])
    assert one["prompt"] == "Make 4 of 100 % of the numbers"


def test_the_highest_reward_is_that_of_the_training_entry_and_not_of_its_eval(tmp_path):
    declared = [("math", "training", 1.0), ("math", "eval", 2.0), ("riddles", "eval", 2.0)]
    with Recorder(tmp_path / "run") as recorder:
        for key, (name, purpose, most) in enumerate(declared):
            row = {"key": str(key), "name": name, "purpose": purpose, "reward_max": most}
            recorder.write("environments", row)
        for row, name in zip(sample_rows(0), ("math", "riddles"), strict=False):
            write_sample(recorder, {**row, "environment": name, "reward": 1.0, "metrics": {}, "prompt_text": name})
    rows = client_of(tmp_path).get("/api/runs/run/prompts").json()["rows"]
    assert {row["environment"]: row["num_right"] for row in rows} == {"math": 1, "riddles": 0}


def test_a_prompt_has_one_key_in_all_runs_and_leads_to_its_answers(client):
    key = client.get(f"{RUN}/samples/1/16-0").json()["prompt_key"]
    for run in ("first", "below~second"):
        rows = client.get(f"/api/runs/{run}/samples?prompt={key}").json()["rows"]
        assert {(row["environment"], row["step"]) for row in rows} == {("countdown", 4)} and len(rows) == 8


def test_answers_with_recorded_tokens_have_the_sum_of_their_logprobs_and_their_ratio(tmp_path):
    recorded = {"0-0": ([-0.5, -1.0], [-0.25, -0.5]), "0-1": ([-0.5, math.nan], [-1.0, -0.5])}
    with Recorder(tmp_path / "run") as recorder:
        for row in sample_rows(0)[:3]:
            recorder.write("samples", row)
        for name, (engine, trainer) in recorded.items():
            numbers = {"engine_logprobs": engine, "trainer_logprobs": trainer}
            recorder.write("tokens", {"sample_id": name, "part": 0, "step": 0, **numbers})
    client = client_of(tmp_path)
    (group,) = client.get("/api/runs/run/groups?step=0").json()
    assert [(one["logprob_sum"], one["ratio"]) for one in group["samples"]] == [
        (pytest.approx(-1.5), pytest.approx(math.exp(0.75))),
        (None, pytest.approx(math.exp(-0.5))),  # where one of its numbers is missing, the others have a ratio
        (None, None),
    ]


def test_a_list_shows_where_the_prompts_of_an_environment_differ(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for number, row in enumerate(sample_rows(0)[:3]):
            prompt = f"<|im_start|>user\nSolve this riddle with the given numbers: {number}<|im_end|>\n"
            write_sample(recorder, {**row, "environment": "riddles" if number else "one", "prompt_text": prompt})
    rows = client_of(tmp_path).get("/api/runs/run/samples").json()["rows"]
    shown = {row["sample_id"]: row["prompt"] for row in rows}
    same = "Solve this riddle with the given numbers:"
    assert shown == {"0-0": f"{same} 0", "0-1": "… 1", "0-2": "… 2"}


def test_tokens_of_training_sequences_go_to_the_answers_that_sampled_them():
    turns = [
        {"turn": 0, "role": "assistant", "num_tokens": 2, "restarts": None, "parent": None},
        {"turn": 1, "role": "tool", "num_tokens": 1, "restarts": False},
        {"turn": 2, "role": "assistant", "num_tokens": 1, "restarts": None, "parent": 0},
    ]
    numbers = {name: [0.0, 0.1, 0.2, 0.3, 0.4] for name in ("engine_logprobs", "trainer_logprobs", "entropies")}
    sequence = {"part": 0, "token_ids": [9, 1, 2, 8, 3], "versions": [-1, 4, 4, -1, 5]}
    add_tokens(turns, [{**sequence, "trained": [False, True, True, False, True], **numbers}])
    assert (turns[0]["token_ids"], turns[0]["versions"], turns[2]["token_ids"]) == ([1, 2], [4, 4], [3])
    assert turns[2]["entropies"] == [0.4] and "token_ids" not in turns[1]


def test_tokens_of_an_old_record_without_a_column_are_shown_without_it():
    turn = {"turn": 0, "role": "assistant", "num_tokens": 2, "restarts": None, "parent": None}
    numbers = {"engine_logprobs": [0.0, -0.1, -0.2], "trainer_logprobs": None, "entropies": None}
    row = {"part": 0, "token_ids": [9, 1, 2], "versions": [-1, 4, 4], "trained": [False, True, True], **numbers}
    add_tokens([turn], [row])
    assert (turn["token_ids"], turn["logprobs"]) == ([1, 2], [-0.1, -0.2])
    assert not turn.keys() & {"trainer_logprobs", "entropies"}


def test_tokens_have_texts_where_the_tokenizer_is_on_this_machine(client, monkeypatch, tmp_path):
    assert "tokens" not in client.get(f"{RUN}/samples/1/5-2").json()["turns"][0]
    monkeypatch.setattr(rollouts, "find_tokenizer", lambda run_dir, model: tmp_path)
    monkeypatch.setattr(rollouts, "token_texts", lambda path, ids: [f"<{token}>" for token in ids])
    (turn,) = [turn for turn in client.get(f"{RUN}/samples/1/5-2").json()["turns"] if turn["token_ids"]]
    assert turn["tokens"] == [f"<{token}>" for token in turn["token_ids"]]


PROMPTS = {
    "of a model": [("system", "Be kind. " * 60), ("user", "Make é 7")],
    "with examples": [("user", "Make 5"), ("assistant", "x" * 400), ("user", "Make é 7")],
    "without a template": [("prompt", "Make é 7")],
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_a_list_shows_the_last_message_of_the_user_and_not_the_system_prompt(tmp_path, prompt):
    messages = [{"role": role, "content": text} for role, text in prompt]
    with Recorder(tmp_path / "run") as recorder:
        write_sample(recorder, {**sample_rows(0)[0], "prompt_text": "rendered", "messages": messages})
    (row,) = client_of(tmp_path).get("/api/runs/run/samples").json()["rows"]
    assert "Make é 7" in row["prompt"][:30]


def test_items_of_an_eval_are_listed_without_the_instruction_that_all_have(tmp_path):
    same = "Think step by step, and put your final answer within the box."
    with Recorder(tmp_path / "run") as recorder:
        recorder.write("evals", {"eval_id": "e", "name": "own", "step": 0})
        for item, row in enumerate(sample_rows(0)[:2]):
            prompt = f"<|im_start|>user\n{same}\n\n{item} + 1?<|im_end|>\n"
            write_sample(recorder, {**row, "status": "eval", "environment": "own", "prompt_text": prompt})
            recorder.write("eval_samples", {"eval_id": "e", "sample_id": row["sample_id"], "step": 0, "item": item})
    client = client_of(tmp_path)
    rows = client.get("/api/runs/run/evals/1/e/samples").json()
    assert [row["prompt"] for row in rows] == ["… 0 + 1?", "… 1 + 1?"]


def write_tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True)
    words = {"▁the": 0, "▁answer": 1, "s": 2, "<end>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_tokens_keep_the_blank_before_a_word(tmp_path):
    path = write_tokenizer(tmp_path / "model")
    texts = token_texts(path, [0, 1, 2])
    assert "".join(texts).lstrip() == "the answers"
    assert texts[1:] == [" answer", "s"]


def test_the_run_directory_comes_before_the_model_of_the_config(tmp_path):
    own = write_tokenizer(tmp_path / "run" / "model")
    other = write_tokenizer(tmp_path / "base")
    assert find_tokenizer(tmp_path / "run", str(other.parent)) == own
    assert find_tokenizer(tmp_path / "elsewhere", str(other.parent)) == other


def test_a_model_that_is_not_on_this_machine_has_no_tokenizer(tmp_path):
    assert find_tokenizer(tmp_path, "nobody/no-such-model-here") is None
    assert find_tokenizer(tmp_path, "/no/such/folder") is None
    assert find_tokenizer(tmp_path, None) is None


def test_a_damaged_tokenizer_gives_no_texts(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    assert token_texts(tmp_path / "tokenizer.json", [1]) is None
