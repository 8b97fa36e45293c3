"""The environment `dataset`: rows of every known form and file, every reward, and mistakes in its arguments."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests import released
from tests.unit.environments.fake_hub import FakeDataset, serve_rows

from telescope.cli.main import main
from telescope.environments.arguments import known_arguments
from telescope.environments.base import Environment
from telescope.environments.hub import hub_rows
from telescope.environments.local_rollout import Answer, roll_out_item
from telescope.environments.math_problems import INSTRUCTION_PROMPT
from telescope.environments.registry import environment_class, get_environment
from telescope.errors import UnreachableError, UserError

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 - 1?"}
GSM8K = {"question": "How many clips?", "answer": "48/2 = <<48/2=24>>24 in May.\n#### 1,072"}
VERL = {
    "data_source": "exam", "prompt": [SYSTEM, USER], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": 0}, "extra_info": {"index": 7},
}  # fmt: skip
TRL = {"prompt": [USER], "ground_truth": "0", "hint": "none"}
MATH = {"problem": "Half?", "solution": r"So the answer is \boxed{\frac{1}{2}}.", "level": "Level 3"}
FORMS = [
    (GSM8K, "rows of GSM8K", "How many clips?", "1,072", "1072"), (VERL, "rows of verl", [SYSTEM, USER], "0", "0"),
    (TRL, "rows of TRL", [USER], "0", "0"),
    ({"prompt": json.dumps([USER]), "answer": 0}, "rows of TRL", [USER], "0", "0"),
    ({"prompt": str([SYSTEM, USER]), "answer": 0}, "rows of TRL", [SYSTEM, USER], "0", "0"),
    ({"prompt": json.dumps(USER), "answer": 0}, "rows of TRL", [USER], "0", "0"),
    ({"prompt": [{"from": "human", "value": "1 - 1?"}], "answer": 0}, "rows of TRL", [USER], "0", "0"),
    ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "1 - 1?"}]}], "answer": 0},
     "rows of TRL", [USER], "0", "0"),
    ({"prompt": '[{"n": 1}, 2]', "answer": 1}, "rows of TRL", '[{"n": 1}, 2]', "1", "1"),
    (MATH, "questions with answers", "Half?", r"\frac{1}{2}", "0.5"),
    ({"prompt": "1?", "answer": False}, "rows of TRL", "1?", "false", "False"),
    ({"question": "1?", "answer": ["2", "4/2"]}, "questions with answers", "1?", "2", "2.0"),
    ({"instruction": "Half?", "input": "of 4", "output": "2"}, "questions with answers", "Half?\n\nof 4", "2", "2"),
    ({"question": "2?", "choices": ["1", "4/2"], "answer": 1},
     "questions with answers", "2?\n\nA. 1\nB. 4/2", "B", "2"),
    ({"question": "2?", "choices": ["1", "4/2", "3"], "answer": "1"},
     "questions with answers", "2?\n\nA. 1\nB. 4/2\nC. 3", "A", "1"),
    ({"question": "1 x?", "choices": ["pear", "pears"], "answer": "0"},
     "questions with answers", "1 x?\n\nA. pear\nB. pears", "A", "pear"),
    ({"question": "2?", "options": {"A": "1", "B": "2"}, "answer": "B"},
     "questions with answers", "2?\n\nA. 1\nB. 2", "B", "B"),
    ({"question": "2?", "A": "1", "B": "2", "C": "", "answer": "B"}, "questions with answers",
     "2?\n\nA. 1\nB. 2", "B", "2"),
    ({"question": "1 = 1?", "choices": ["true", "false"], "answer": True}, "questions with answers",
     "1 = 1?\n\nA. true\nB. false", "A", "true"),
    ({"question": "1 = 1?", "choices": ["no", "yes"], "answer": True}, "questions with answers",
     "1 = 1?\n\nA. no\nB. yes", "B", "yes"),
    ({"question": "2?", "choices": ["", "1", None, "2"], "answer": 3}, "questions with answers",
     "2?\n\nB. 1\nD. 2", "D", "2"),
    ({"question": "2?", "choices": {"text": ["1", "2"], "label": ["C", "D"]}, "answerKey": "D"},
     "questions with answers", "2?\n\nC. 1\nD. 2", "D", "2"),
    ({"question": "Is 2 a or b?", "choices": ["a", "b"], "answer": "b"}, "questions with answers", "Is 2 a or b?",
     "B", "b"),
    ({"messages": [SYSTEM, USER, {"role": "assistant", "content": "0"}]},
     "questions with answers", [SYSTEM, USER], "0", "0"),
    ({"conversations": [{"from": "human", "value": "1 - 1?"}, {"from": "gpt", "value": "It is \\boxed{0}."}]},
     "questions with answers", [USER], "0", "0"),
    ({"query": "1?", "target": 2.0, "n": None}, "questions with answers", "1?", "2", "2"),
]  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        texts = [json.dumps(row) for row in rows]
        path.write_text("\n".join(texts) if path.suffix == ".jsonl" else f"[{','.join(texts)}]")
    return str(path)


def made(path: str, **kwargs: Any) -> Any:
    return get_environment("dataset", path=path, verify_timeout_seconds=60.0, **kwargs)


def reward_of(environment: Any, completion: str, item: int = 0) -> dict[str, Any]:
    score = roll_out_item(environment, item, lambda _: Answer(completion)).score
    return {"reward": score["total_reward"], **score["sample_metrics"]}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize(("row", "form", "prompt", "answer", "right"), FORMS)
def test_rows_of_other_trainers_are_recognized(tmp_path, caplog, suffix, row, form, prompt, answer, right):
    environment = made(write(tmp_path / f"rows{suffix}", [row, row]))
    sample = environment.get_sample(1)
    assert (len(environment), sample.prompt, sample.answer) == (2, prompt, answer)
    assert row.items() <= sample.metadata.items(), "all of a row"
    column = "prompt" if row is VERL else next(iter(row))
    assert f"rows{suffix} has {form}: 2 items, prompt in '{column}'" in caplog.text
    assert environment.check_gold(sample).problem is None
    assert reward_of(environment, rf"<think>\boxed{{9}}</think>It is \boxed{{{right}}}.") == {
        "reward": 1.0, "correct": 1.0, "format": 1.0,
    }  # fmt: skip
    assert reward_of(environment, r"\boxed{17}") == {"reward": 0.0, "correct": 0.0, "format": 1.0}
    assert reward_of(environment, "I do not know.") == {"reward": 0.0, "correct": 0.0, "format": 0.0}


@pytest.mark.parametrize(
    ("rows", "prompts"),
    [([{"A": "1", "B": "2", "C": "3"}, {"A": "1", "B": "2"}], ["2?\n\nA. 1\nB. 2\nC. 3", "2?\n\nA. 1\nB. 2"]),
     ([{"A": "", "B": ""}, {"A": "1", "B": "2"}], ["2?", "2?\n\nA. 1\nB. 2"]),
     ([{"choices": None}, {"choices": []}, {"choices": ["1", "2"]}], ["2?", "2?", "2?\n\nA. 1\nB. 2"])],
    ids=["a column", "any in columns", "any in a list"],
)  # fmt: skip
def test_a_row_may_lack_choices_that_others_have(tmp_path, rows, prompts):
    environment = made(write(tmp_path / "rows.jsonl", [{"question": "2?", "answer": "2", **row} for row in rows]))
    assert [environment.get_sample(item).prompt for item in range(len(rows))] == prompts


def test_answers_that_are_none_of_the_choices_of_their_row_are_counted(tmp_path):
    answers = ["B", "E", 1, 7, "4/2", "An open one", None]
    rows = [{"question": "2?", "choices": ["1", "4/2"], "answer": answer} for answer in answers]
    rows[5]["choices"] = None
    environment = made(write(tmp_path / "rows.jsonl", rows), reward="exact")
    assert len(environment) == 6, "a row without an answer is left out"
    said = "The answer of 2 rows is none of the row's choices, and kept as it is: row 1 ('E') is one."
    assert said in environment._notices[0]


def test_a_list_of_texts_before_a_question_is_no_list_of_choices(tmp_path):
    rows = [{"question": "Who?", "context": ["One text.", "Another."], "answer": "Ada"}]
    environment = made(write(tmp_path / "rows.jsonl", rows), prompt=["context", "question"], reward="exact")
    assert "Another." in environment.get_sample(0).prompt
    assert "choices" not in environment._notices[0]


def test_a_csv_file_keeps_texts_and_a_dataset_of_the_hub_its_split(tmp_path, monkeypatch):
    assert made(write(tmp_path / "rows.csv", [GSM8K])).get_sample(0).answer == "1,072"
    (tmp_path / "lines.csv").write_text('question,answer\n"a\u2028b\nc",4\n')
    assert made(str(tmp_path / "lines.csv")).get_sample(0).prompt == "a\u2028b\nc"
    for name, text in (("rows.csv", "question;answer\n1,0+1?;2,0\n"), ("rows.tsv", "question\tanswer\n1,0+1?\t2,0\n")):
        (tmp_path / name).write_text(text)
        sample = made(str(tmp_path / name), reward="exact").get_sample(0)
        assert (sample.prompt, sample.answer) == ("1,0+1?", "2,0")
    (tmp_path / "long.csv").write_text(f"question,answer\n{'word ' * 100_000},2\n")
    assert len(made(str(tmp_path / "long.csv"), reward="exact").get_sample(0).prompt) > 400_000
    hub = serve_rows(monkeypatch, lambda *_: [GSM8K])
    assert made("openai/gsm8k", subset="main", split="test").get_sample(0).answer == "1,072"
    assert hub.requested == [("openai/gsm8k", "main", "test")]


def test_a_folder_has_a_file_for_each_split(tmp_path):
    for split, count in (("train", 3), ("test", 2)):
        write(tmp_path / f"{split}.parquet", [VERL] * count)
    assert [len(made(str(tmp_path), **kwargs)) for kwargs in ({}, {"split": "test"})] == [3, 2]
    message = r"no data file of the split 'dev'\. Data files in .*: test.parquet, train.*subfolder 'dev'"
    with pytest.raises(UserError, match=message):
        len(made(str(tmp_path), split="dev"))
    write(tmp_path / "train-old.parquet", [VERL])
    assert len(made(str(tmp_path))) == 3


def test_json_lines_may_be_in_a_json_file_and_shards_have_a_hash(tmp_path):
    """Older datasets of the hub have both."""
    for name in ("train-00000-of-00002-6ef3991c06080e14", "train-00001-of-00002-a3f5"):
        (tmp_path / f"{name}.json").write_text(f"{json.dumps(GSM8K)}\n" * 2)
    assert len(made(str(tmp_path))) == 4
    (tmp_path / "broken.json").write_text(f"{json.dumps(GSM8K)}\n[")
    with pytest.raises(UserError, match=r"broken\.json cannot be read: line 2 is not JSON"):
        len(made(str(tmp_path / "broken.json")))


def test_values_of_several_types_in_a_column_are_no_json(tmp_path, monkeypatch):
    """`datasets` stores them as JSON."""
    values = [1, "two", None, {"b": [1]}]
    encoded = pa.array([None if value is None else json.dumps(value) for value in values])
    coded = pa.ExtensionArray.from_storage(pa.json_(pa.string()), encoded)
    nested = pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1, 2, 3, 4], coded)], ["list"])
    table = pa.table({"a": coded, "n": nested})
    expected = [{"a": value, "n": {"list": [value]}} for value in values]
    pq.write_table(table, tmp_path / "train.parquet")
    assert list(hub_rows("x", str(tmp_path / "train.parquet"), [None], "train", [])) == expected
    monkeypatch.setattr(FakeDataset, "__getitem__", lambda *_: table)
    serve_rows(monkeypatch, lambda *_: [])
    assert list(hub_rows("x", "a/b", [None], "train", [])) == expected


def test_a_broken_dataset_of_the_hub_is_not_told_to_connect(monkeypatch):
    class DatasetGenerationError(Exception): ...

    broken = DatasetGenerationError("An error occurred while generating the dataset")
    broken.__cause__ = ValueError("column names don't match")
    serve_rows(monkeypatch, broken)
    with pytest.raises(UserError, match=r"cannot be loaded: column names don't match$"):
        list(hub_rows("x", "a/b", [None], "train", []))
    broken.__cause__ = ConnectionError("reset")
    with pytest.raises(UnreachableError, match="Connect this machine"):
        list(hub_rows("x", "a/b", [None], "train", []))


def test_a_missing_file_is_refused_with_close_names_first_and_without_files_of_tools(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["a.jsonl", "data/train.jsonl", "data/b.csv", "packages.json"]
    no_data = [".venv/x.json", ".hidden.json", "data/.c.json", "node_modules/x.json", "web/package.json"]
    for name in [*names, *no_data, "package.json", "package-lock.json", "tsconfig.json", "tsconfig.app.json"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r": data/train.jsonl, a.jsonl, data/b.csv, packages.json\. Give"):
        len(made("trian.jsonl"))


def test_a_subset_is_a_subfolder(tmp_path):
    for subset, count in (("main", 2), ("socratic", 3)):
        (tmp_path / subset).mkdir()
        write(tmp_path / subset / "train-00000-of-00001.jsonl", [GSM8K] * count)
    assert [len(made(str(tmp_path), subset=subset)) for subset in ("main", "socratic")] == [2, 3]
    with pytest.raises(UserError, match=r"files of the split 'train' in main, socratic\. Set subset to one"):
        len(made(str(tmp_path)))
    with pytest.raises(UserError, match=r"no subfolder of the subset 'hard'\. Data files in .*: main/train-"):
        len(made(str(tmp_path), subset="hard"))


SENT = {"role": "assistant", "content": "0"}


@pytest.mark.parametrize(("prompt", "answer", "message"), [
    ([USER | {"content": None}], 0, "the content of a message is 'None', not text"),
    ([USER | {"content": [{"type": "image_url"}]}], 0, "image_url.*, not text"),
    (["a", "b"], 0, "'a' is no message"),
    ([{"from": "robot", "value": "?"}], 0, "robot.* is no message with a role of system"),
    ([USER, SENT], 0, "its last message is of the role 'assistant'. End it with"),
    ([SYSTEM], 0, "its last message is of the role 'system'"),
    (f"[{USER}\n {USER}]", 0, "neither JSON nor"),
    ("?", {"value": 5}, "has fields. Name one, as in answer: column.value"),
])  # fmt: skip
def test_unusable_rows_are_left_out_and_refused_if_most_are(tmp_path, caplog, prompt, answer, message):
    bad, good = {"prompt": prompt, "answer": answer}, {"prompt": "1?", "answer": 1}
    environment = made(write(tmp_path / "some.jsonl", [good, good, bad]))
    assert len(environment) == 2
    place = r"row 2 \(prompt in 'prompt', answer in 'answer'\)"
    assert re.search(rf"unusable: 1 row, such as {place}: .*{message}", caplog.text)
    with pytest.raises(UserError, match=rf"most.jsonl: 2 of 3 rows cannot be used, such as row 1 .*{message}"):
        len(made(write(tmp_path / "most.jsonl", [good, bad, bad])))


def test_binary_columns_are_read_as_text_or_left_out(tmp_path, caplog):
    environment = made(write(tmp_path / "b.parquet", [{"question": b"q\xc3\xa9", "answer": b"5"}] * 2))
    assert (environment.get_sample(0).prompt, environment.get_sample(0).answer) == ("q\u00e9", "5")
    with pytest.raises(UserError, match=r"2 of 2 rows cannot be used, such as row 0 .* can't decode byte 0xff"):
        len(made(write(tmp_path / "b.parquet", [{"question": b"q", "answer": b"\xff"}] * 2)))


def test_columns_are_recognized_in_all_rows(tmp_path, caplog):
    rows = [{"question": "?", "solution": "5", "answer": None}] * 150 + [{"question": "?", "answer": "5"}] * 500
    assert len(made(write(tmp_path / "rows.jsonl", rows))) == 500
    assert "answer in 'answer'" in caplog.text
    assert "Left out without a prompt or an answer: 150 rows." in caplog.text


def test_problems_without_an_answer_in_numina_math_are_left_out(tmp_path, caplog):
    rows = [{"problem": "?", "answer": answer} for answer in ("5", "proof", "notfound")]
    assert len(made(write(tmp_path / "rows.jsonl", rows))) == 1
    assert "Left out without a prompt or an answer: 2 rows." in caplog.text


def test_rows_whose_prompt_shows_an_image_are_refused(tmp_path):
    rows = [{"problem": "<image>What is x?", "images": ["a.png"], "answer": "5"}]
    with pytest.raises(UserError, match="its prompt shows an image, which no model sees here"):
        len(made(write(tmp_path / "rows.jsonl", rows)))


def test_rows_are_shuffled_by_a_seed_cut_to_a_number_and_left_out_without_an_answer(tmp_path, caplog):
    rows = [{"question": f"{n}?", "answer": n} for n in range(50)] + [{"question": "?", "answer": None}]
    path = write(tmp_path / "rows.jsonl", rows)
    first, again = (made(path, seed=1, num_samples=20)._loaded() for _ in range(2))
    assert first == again
    assert len({sample.answer for sample in first}) == 20
    assert made(path).get_sample(0).answer == "0"
    assert "50 items" in caplog.text
    assert "Left out without a prompt or an answer: 1 row." in caplog.text


@pytest.mark.parametrize(("row", "kwargs", "messages"), [
    (GSM8K, {}, [f"{INSTRUCTION_PROMPT}\n\nHow many clips?"]),
    (VERL, {}, ["Be brief.", f"{INSTRUCTION_PROMPT}\n\n1 - 1?"]),
    (VERL, {"instruction_prompt": None}, ["Be brief.", "1 - 1?"]),
    (VERL, {"instruction_prompt": "Think."}, ["Be brief.", "Think.\n\n1 - 1?"]),
    (TRL, {"system_prompt": "S", "reward": "regex", "pattern": "[0-9]+"}, ["S", "1 - 1?"]),
    ({"prompt": "1? Answer after ####.", "answer": "1"}, {}, ["1? Answer after ####."]),
    ({"prompt": "1?", "answer": "1"}, {"reward": "exact"}, ["<answer>", "1?"]),
])  # fmt: skip
def test_the_form_of_the_answer_is_asked_for_unless_the_prompt_does(tmp_path, row, kwargs, messages):
    environment = made(write(tmp_path / "rows.json", [row]), **kwargs)
    contents = [message["content"] for message in environment.build_messages(environment.get_sample(0).prompt)]
    if messages[0] == "<answer>":
        assert all(part in contents[0] for part in messages)
    else:
        assert contents == messages


@pytest.mark.parametrize(("completion", "expected"), [
    ("<answer> Blue\n sky </answer>", (1.0, 1.0)), ("Blue sky", (1.0, 0.0)), (r"\boxed{Blue sky}", (1.0, 1.0)),
    ("#### Blue sky", (1.0, 1.0)), ("<answer>blue sky</answer>", (0.0, 1.0)), ("", (0.0, 0.0)),
])  # fmt: skip
def test_exact_compares_texts(tmp_path, completion, expected):
    environment = made(write(tmp_path / "rows.json", [{"prompt": "?", "answer": "Blue sky"}]), reward="exact")
    reward = reward_of(environment, completion)
    assert (reward["reward"], reward["format"]) == expected
    assert reward["correct"] == reward["reward"]


@pytest.mark.parametrize("gold", ['print("answer: 5")', "#### Title", '["a", "b"]', r"is \boxed{5}"])
def test_exact_keeps_golds_that_contain_a_form(tmp_path, gold):
    environment = made(write(tmp_path / "rows.json", [{"prompt": "?", "answer": gold}]), reward="exact")
    assert environment.check_gold(environment.get_sample(0)).problem is None
    for text, reward in ((gold, 1.0), ("5", 0.0), ("a", 0.0)):
        assert reward_of(environment, f"<answer>{text}</answer>")["reward"] == reward
    rows = made(write(tmp_path / "gsm8k.json", [GSM8K]), reward="exact")
    assert reward_of(rows, "<answer>1,072</answer>")["reward"] == 1.0


def test_a_pattern_finds_the_answer_or_is_the_reward(tmp_path):
    rows = [{"prompt": "?", "answer": "7", "note": "x"}]
    path = write(tmp_path / "rows.json", rows)
    environment = made(path, reward="regex", pattern=r"Result: (\w+)")
    assert [reward_of(environment, f"Result: 1, Result: {n}")["reward"] for n in (7, 8)] == [1.0, 0.0]
    environment = made(write(tmp_path / "either.json", rows), reward="regex", pattern=r"res=(\d+)|out=(\d+)")
    assert [reward_of(environment, text)["reward"] for text in ("res=7", "out=7", "out=8", "7")] == [1.0, 1.0, 0.0, 0.0]
    matches = made(write(tmp_path / "prompts.json", [{"prompt": "?"}]), reward="regex", pattern=r"^[a-z]+$")
    assert [reward_of(matches, text)["reward"] for text in ("abc", "ABC")] == [1.0, 0.0]


FUNCTIONS = """
def length(completions, **kwargs):
    assert kwargs["hint"] == ["none"] and "prompt" not in kwargs, kwargs
    return [float(len(c[0]["content"] if isinstance(c, list) else c)) for c in completions]

async def right(prompts, completions, ground_truth):
    assert isinstance(prompts[0], list) == isinstance(completions[0], list)
    return [float(truth in str(completion)) for truth, completion in zip(ground_truth, completions)]

def absent(completions, missing_column):
    return [0.0]

def silent(completions):
    return [None]

def nothing(completions):
    pass

def logs(completions, log_metric, log_extra, hint):
    log_extra("answer", completions)
    log_metric("hints", float(hint != [None]))
    return [0.5]

def tokens(completion_ids):
    return [float(len(ids)) for ids in completion_ids]

def by_place(completions, hint="", /, *, ground_truth):
    return [float(completions[0] is not None and (hint, ground_truth) == (["none"], ["0"]))]

def correct(completions):
    return [2.0]

def wrong(completions):
    return ["good"]
"""


@pytest.fixture
def functions(tmp_path) -> str:
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    return str(tmp_path / "my_rewards.py")


@pytest.mark.parametrize("prompt", ["1 - 1?", [USER]])
def test_functions_with_the_signature_of_trl_are_rewards(tmp_path, monkeypatch, functions, prompt):
    path = write(tmp_path / "rows.jsonl", [TRL | {"prompt": prompt}])
    both = made(path, reward=[f"{functions}:length", "math", f"{functions}:right"])
    assert reward_of(both, r"\boxed{0}") == {"reward": 11.0, "correct": 1.0, "format": 1.0, "length": 9.0, "right": 1.0}
    monkeypatch.syspath_prepend(tmp_path)
    assert reward_of(made(path, reward="my_rewards:length"), "abc") == {"reward": 3.0, "length": 3.0}
    assert reward_of(made(path, reward="my_rewards:silent"), "abc") == {"reward": 0.0, "silent": 0.0}
    assert reward_of(made(path, reward="my_rewards:by_place"), "abc") == {"reward": 1.0, "by_place": 1.0}
    assert reward_of(made(path, reward="my_rewards:logs"), "abc") == {"reward": 0.5, "logs": 0.5, "hints": 1.0}
    assert reward_of(made(path, reward="my_rewards:correct"), "abc") == {"reward": 2.0, "correct": 2.0}
    for name, returned in (("wrong", "good"), ("nothing", "None")):
        problem = rf"the reward {name} at .*my_rewards.py:[0-9]+ returned .*{returned}.* not a list of one number"
        with pytest.raises(TypeError, match=problem):
            reward_of(made(path, reward=f"my_rewards:{name}"), "abc")
    with pytest.raises(UserError, match="the reward tokens needs 'completion_ids' of TRL, which no reward gets here"):
        len(made(path, reward=f"{functions}:tokens"))
    with pytest.raises(UserError, match=r"reward absent needs 'missing_column', .* It has: prompt, ground_truth, hint"):
        len(made(path, reward=f"{functions}:absent"))
    with pytest.raises(UserError, match=r"has no function 'lenght'\. It has: length, right"):
        made(path, reward=f"{functions}:lenght")


def test_weights_multiply_rewards_and_no_metrics(tmp_path, functions, caplog):
    path = write(tmp_path / "rows.jsonl", [TRL])
    weighted = made(path, reward={"math": 2, f"{functions}:length": -0.5, f"{functions}:right": "1"})
    metrics = {"correct": 1.0, "format": 1.0, "length": 9.0, "right": 1.0}
    assert reward_of(weighted, r"\boxed{0}") == {"reward": 2 - 4.5 + 1} | metrics
    assert "reward 2 x math + -0.5 x length + right." in caplog.text


def test_a_function_gets_null_for_a_column_that_its_row_lacks(tmp_path, functions):
    path = write(tmp_path / "rows.jsonl", [TRL, {key: value for key, value in TRL.items() if key != "hint"}])
    logs = made(path, reward=f"{functions}:logs")
    assert [reward_of(logs, "abc", item)["hints"] for item in (0, 1)] == [1.0, 0.0]


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"path": "trian.jsonl"}, r"no file 'trian.jsonl'\. Data files in .*: train.jsonl\. Give"),
    ({"path": "train.jsonl", "split": "test"}, "is one file, without the split 'test'"),
    ({"path": "train.jsonl", "subset": "hard"}, "is a file, which has no subset 'hard'. Leave it out"),
    ({"path": "train.jsonl", "answer": "anser"}, r"no column 'anser' \(answer\)\. Did you mean 'answer'\? It has"),
    ({"path": "train.jsonl", "prompt": "text"}, r"no column 'text' \(prompt\)\. It has: question, answer"),
    ({"path": "train.jsonl", "reward": "maths"}, "use math, exact or regex, package.module:function"),
    ({"path": "train.jsonl", "reward": ["math", "exact"]}, "at most one of the first three"),
    ({"path": "train.jsonl", "reward": {"math": "high"}}, r"reward\.math is .high., but it must be a number"),
    ({"path": "train.jsonl", "reward": {"math": 1, "exact": 1}}, "a list or mapping with at most one of the first"),
    ({"path": "train.jsonl", "reward": "regex"}, "reward: regex needs a pattern"),
    ({"path": "train.jsonl", "reward": "regex", "pattern": "("}, "is not a regular expression: missing"),
    ({"path": "train.jsonl", "reward": "no_such_module:f"}, "'no_such_module:f' cannot be imported: Module"),
    ({"path": "train.jsonl", "dataset_name": "x"}, "no keyword argument 'dataset_name'. It takes: .*path"),
    ({}, "set path in its kwargs"), ({"path": "notes.txt"}, "no known format. Use a file that ends in .jsonl"),
    ({"path": "other.jsonl"}, r"no prompt \(prompt, .*\)\. It has: a, b\. Set prompt to a column"),
    ({"path": "other.jsonl", "prompt": "a"}, r"no answer .* It has: a, b\. Set answer to a column, or reward"),
    ({"path": "https://example.com/train.jsonl"}, "there is no file 'https://example.com/train.jsonl'"),
    ({"path": "deep.jsonl"}, "deep.jsonl cannot be read: line 1 is not JSON .*recursion"),
    ({"path": "head.csv"}, "head.csv .* is empty. Give a dataset with rows"),
    ({"path": "train.jsonl", "reward": "fractions:Fraction"}, "fractions has no function 'Fraction'"),
    ({"path": "train.jsonl", "reward": "judge.py:compute_score"}, "needs 'data_source', .* Write it as comp"),
    ({"path": "train.jsonl", "reward": "judge.py:single"}, "needs 'completion', .* Did you mean 'completions'"),
    ({"path": "broken.jsonl"}, r"broken.jsonl cannot be read: line 2 is not JSON"),
    ({"path": "list.jsonl"}, r"row 0 of list.jsonl is '\[1\]', not an object"),
    ({"path": "splits.json"}, r"not a list of rows\. It has the keys 'test', 'dev'; set split to one"),
    ({"path": "more.csv"}, r"row 0 of more.csv has more fields than the header, the last '1001'"),
    ({"path": "latin.csv"}, r"byte 16 is 0xe9, which is not UTF-8.* iconv -f WINDOWS-1252 -t UTF-8 latin.csv"),
    ({"path": "latin.jsonl"}, r"line 2, byte 14 is 0xe9, which is not UTF-8"),
    ({"path": "wide.tsv"}, r"byte 0 is 0xff, .* iconv -f UTF-16 -t UTF-8 wide.tsv"),
    ({"path": "fields.jsonl"}, r"The answer \{'value': 5\} has fields. Name one, as in answer: column.value"),
    ({"path": "train.jsonl", "reward": ["json:dumps", "pickle:dumps"]}, "two metrics named 'dumps'"),
    ({"path": "train.jsonl", "reward": ["math", "builtins:format"]}, "two metrics named 'format'"),
    ({"path": "broken.parquet"}, "broken.parquet cannot be read"),
    ({"path": "empty.jsonl"}, "empty.jsonl .* is empty"), ({"path": "saved"}, r"of save_to_disk.*to_parquet\("),
    ({"path": "train.jsonl", "reward": "ends.py:f"}, r"cannot be imported: SystemExit: 0 at .*ends.py:1"),
])  # fmt: skip
def test_a_mistake_is_one_line_that_lists_what_is_there(tmp_path, monkeypatch, kwargs, message):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.jsonl", [GSM8K])
    monkeypatch.chdir(folder)
    texts = {
        "notes.txt": "1", "other.jsonl": '{"a": "1", "b": 2}', "broken.jsonl": '{"a": 1}\n{"a": ', "list.jsonl": "[1]",
        "splits.json": '{"test": [], "dev": []}', "broken.parquet": "1", "empty.jsonl": "",
        "more.csv": "question,answer\nWhat is 1,000+1?,1001\n",
        "latin.csv": "question,answer\n\xe9?,1\n", "wide.tsv": "\xff\xfeq\0",
        "latin.jsonl": '{"a": 1}\n{"question": "\xe9"}',
        "fields.jsonl": '{"question": "?", "answer": {"value": 5}}',
    }  # fmt: skip
    (folder / "saved" / "train").mkdir(parents=True)
    (folder / "saved" / "train" / "data-00000-of-00001.arrow").touch()
    (folder / "ends.py").write_text("exit(0)")
    texts["deep.jsonl"], texts["head.csv"] = "[" * 100_000, "question,answer\n"
    (folder / "judge.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth): ...\ndef single(completion): ...\n"
    )
    if (name := kwargs.get("path")) in texts:
        (folder / name).write_bytes(texts[name].encode("latin-1"))
    with pytest.raises(UserError, match=message) as raised:
        len(get_environment("dataset", **kwargs))
    assert "\n" not in str(raised.value)


def test_a_file_name_in_dataset_name_lists_the_files_of_the_folder(tmp_path, monkeypatch):
    write(tmp_path / "train.jsonl", [MATH])
    monkeypatch.chdir(tmp_path)
    assert get_environment("hendrycks_math", dataset_name="train.jsonl").get_sample(0).answer == r"\frac{1}{2}"
    with pytest.raises(UserError, match=r"_math: there is no file 'tran.jsonl'\. Data files in .*: train.jsonl"):
        len(get_environment("hendrycks_math", dataset_name="tran.jsonl"))


def test_envs_try_lists_rows_with_their_golds(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [GSM8K, {"question": "?", "answer": "}"}] + [GSM8K] * 20)
    assert main(["envs", "try", "dataset", "--set", f"path={path}"]) == 0
    printed = capsys.readouterr().out
    assert "dataset, 22 items" in printed
    rows = [line.split("│")[1].strip() for line in printed.splitlines() if "1072" in line]
    assert rows == ["0", *map(str, range(2, 10))]
    assert "math-verify" in printed


@pytest.mark.parametrize(
    "body", ["return [1.0, 2.0]", "return [float('nan')]", "return {'score': 1}", "return 1 / 0", "exit(0)"]
)
def test_envs_try_names_the_line_of_a_reward_that_fails(tmp_path, capsys, body):
    path = write(tmp_path / "rows.jsonl", [GSM8K])
    (tmp_path / "rw.py").write_text(f"\ndef j(completions):\n    {body}\n")
    settings = ["--set", f"path={path}", "--set", f"reward={tmp_path}/rw.py:j", "--answer", "x"]
    assert main(["envs", "try", "dataset", *settings]) == 2
    error = capsys.readouterr().err
    assert re.search(r"dataset, item 0: .*rw\.py:[23]", error)
    assert "Traceback" not in error


TASKS = {
    "math": ["chain_sum", "gcd", "simple_equations", "fraction_simplification", "simple_integration",
             "decimal_arithmetic"],
    "exact": ["caesar_cipher", "spell_backward", "binary_matrix", "n_queens", "tower_of_hanoi", "knights_knaves"],
}  # fmt: skip


def test_procedural_tasks_are_answered_by_their_own_golds(tmp_path):
    files = released.reasoning_gym_rows(tmp_path, [task for tasks in TASKS.values() for task in tasks], 12)
    for reward, tasks in TASKS.items():
        for task in tasks:
            environment = made(str(files[task]), reward=reward)
            assert len(environment) == 12
            for item in range(12):
                sample = environment.get_sample(item)
                assert environment.check_gold(sample).problem is None, (task, sample.answer)
                answer = f"\\boxed{{{sample.answer}}}" if reward == "math" else f"<answer>{sample.answer}</answer>"
                assert reward_of(environment, answer, item)["reward"] == 1.0, (task, sample.answer)
                assert reward_of(environment, "<answer>nothing</answer>", item)["reward"] == 0.0


def test_the_page_names_every_argument():
    table = (Path(__file__).parents[3] / "docs" / "data.md").read_text().split("| argument |")[1].split("\n\n")[0]
    named = {name for line in table.splitlines()[2:] for name in re.findall("`(.*?)`", line.split("|")[1])}
    inherited = {"eos_token", "add_thinking_prefix", "verify_timeout_seconds"}
    assert named == known_arguments(environment_class("dataset"), Environment) - inherited
