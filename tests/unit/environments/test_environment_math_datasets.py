r"""`dapo_math` and `deepscaler`: their rows, their form of an answer, and the reward of `hendrycks_math`."""

import json

import pytest
from tests.unit.environments.fake_hub import serve_rows

from telescope.environments.math_problems import INSTRUCTION_PROMPT
from telescope.environments.registry import get_environment
from telescope.errors import UnreachableError, UserError

DAPO, DEEPSCALER = "BytedTsinghua-SIA/DAPO-Math-17k", "agentica-org/DeepScaleR-Preview-Dataset"


def dapo_row(question: str, answer: str) -> dict:
    return {
        "data_source": "exam", "prompt": [{"content": question, "role": "user"}],
        "reward_model": {"ground_truth": answer, "style": "rule"}, "extra_info": {"index": "1"},
    }  # fmt: skip


@pytest.fixture(scope="module")
def dapo():
    return get_environment("dapo_math", dataset="own", verify_timeout_seconds=60.0)


def test_dapo_rows_become_one_sample_per_problem(monkeypatch):
    rows = [dapo_row("1 + 1?", "2"), dapo_row("2 + 2?", "4"), dapo_row("1 + 1?", "2"), dapo_row("?", "")]
    hub = serve_rows(monkeypatch, lambda *_: rows)
    environment = get_environment("dapo_math")
    assert [(s.prompt, s.answer) for s in environment._loaded()] == [("1 + 1?", "2"), ("2 + 2?", "4")]
    assert hub.requested == [(DAPO, None, "train")]
    assert environment.build_messages("1 + 1?") == [{"role": "user", "content": "1 + 1?"}], "it has its instruction"


def test_deepscaler_rows_become_samples(monkeypatch):
    rows = [{"problem": "1 + 1?", "answer": "2", "solution": ""}, {"problem": "x?", "answer": None, "solution": ""}]
    hub = serve_rows(monkeypatch, lambda *_: rows)
    environment = get_environment("deepscaler", dataset_split="dev", dataset_subset="part")
    assert [(s.prompt, s.answer) for s in environment._loaded()] == [("1 + 1?", "2")]
    assert hub.requested == [(DEEPSCALER, "part", "dev")]
    assert environment.build_messages("1 + 1?")[0]["content"] == f"{INSTRUCTION_PROMPT}\n\n1 + 1?"
    result = environment.compute_reward(r"\boxed{2}", environment.get_sample(0))
    assert (result.total_reward, result.sample_tags) == (1.0, {})


@pytest.mark.parametrize(("name", "missing"), [
    ("dapo_math", "prompt, reward_model"),
    *[(name, "problem or question") for name in ("deepscaler", "hendrycks_math")],
])  # fmt: skip
def test_a_dataset_without_its_columns_is_refused(monkeypatch, name, missing):
    serve_rows(monkeypatch, lambda *_: [{"text": "1 + 1?", "answer": "2"}])
    with pytest.raises(
        UserError, match=rf"{name}: .*'a/b' \(split 'train'\) has no column {missing}\. It has: text, ans"
    ):
        get_environment(name, dataset_name="a/b").get_sample(0)


@pytest.mark.parametrize("name", ["dapo_math", "deepscaler", "hendrycks_math"])
def test_an_unreachable_hub_is_an_error_and_the_shipped_problems_are_asked_for(monkeypatch, name):
    serve_rows(monkeypatch, ConnectionError("no network"))
    for kwargs in ({}, {"dataset": "auto"}, {"dataset": "hub"}, {"dataset_name": "someone/exams"}):
        with pytest.raises(UnreachableError, match=rf"{name}: .*no network.*hf download.*or set dataset: own"):
            get_environment(name, **kwargs).get_sample(0)
    environment = get_environment(name, dataset="own", num_samples=5, verify_timeout_seconds=60.0)
    assert len(environment) == 5
    for sample in environment._loaded():
        assert environment.compute_reward(f"\\boxed{{{sample.answer}}}", sample).total_reward == 1.0
    with pytest.raises(UserError, match='dataset is "none", but it must be one of "hub", "own", "auto"'):
        get_environment(name, dataset="none")


def test_a_missing_split_is_an_error_that_lists_those_of_the_hub(monkeypatch):
    serve_rows(monkeypatch, ValueError("Unknown split \"tran\". Should be one of ['train', 'test']."))
    with pytest.raises(UserError, match=r"dapo_math: .*split 'tran'.*\['train', 'test'\]"):
        get_environment("dapo_math", dataset_split="tran").get_sample(0)


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 - 1?"}


@pytest.mark.parametrize(
    ("prompt", "expected"), [([SYSTEM, USER], [SYSTEM, USER]), ([USER], "1 - 1?"), ("1 - 1?", "1 - 1?")]
)
@pytest.mark.parametrize(
    ("truth", "answer"),
    [("0", "0"), (0, "0"), (False, "false"), (0.0, "0"), ("#### 0", "0"), (["0"], "0"), ('["0"]', "0")],
)
def test_rows_of_ones_own_keep_their_whole_prompt_and_an_answer_of_zero(monkeypatch, prompt, expected, truth, answer):
    serve_rows(monkeypatch, lambda *_: [{"prompt": prompt, "reward_model": {"ground_truth": truth}}])
    environment = get_environment("dapo_math", dataset_name="someone/rows", verify_timeout_seconds=60.0)
    (sample,) = environment._loaded()
    assert (sample.prompt, sample.answer) == (expected, answer)
    assert environment.build_messages(sample.prompt)[-1] == USER
    assert environment.compute_reward(f"Answer: {answer}", sample).total_reward == 1.0
    assert environment.check_gold(sample).problem is None


def test_a_hundred_rows_with_one_system_message_are_a_hundred_items(tmp_path):
    asked = [[SYSTEM, {"role": "user", "content": f"{n} - 1?"}] for n in range(100)]
    rows = [{"prompt": prompt, "reward_model": {"ground_truth": n - 1}} for n, prompt in enumerate(asked)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = get_environment("dapo_math", dataset_name=str(tmp_path / "rows.jsonl"))
    assert [sample.answer for sample in environment._loaded()] == [str(n - 1) for n in range(100)]


def test_any_of_several_answers_is_right(monkeypatch):
    serve_rows(monkeypatch, lambda *_: [{"problem": [USER], "answer": ["0", r"\text{nothing}"]}])
    environment = get_environment("deepscaler", dataset_name="a/b", verify_timeout_seconds=60.0)
    (sample,) = environment._loaded()
    assert sample.prompt == [USER]
    rewards = [environment.compute_reward(rf"\boxed{{{text}}}", sample).total_reward for text in ("0", "nothing", "1")]
    assert rewards == [1.0, 1.0, 0.0]


def test_a_seed_shuffles(dapo):
    first, again = (get_environment("dapo_math", dataset="own", seed=3)._loaded() for _ in range(2))
    assert first == again != dapo._loaded()
    assert sorted(s.prompt for s in first) == sorted(s.prompt for s in dapo._loaded())


@pytest.mark.parametrize("completion", [
    "Answer: 5", "So:\n\n**Answer:** $5$.", "**Answer: 5**", "answer: x = 5", r"Answer: \boxed{5}.",
    r"It is \boxed{5}.", "Answer: 7\nNo.\nAnswer: 5\nThat is all.", "<think>Answer: 7</think>Answer: 5",
    "### Answer:\n\n5", "- _Answer_: 5", "So my Final Answer: 5",
    "**Answer:**\n\\[\n\\boxed{5}\n\\]", "Answer:\n$$\n5\n$$", r"Answer: \[ 5 \]",
])  # fmt: skip
def test_a_right_answer_in_the_asked_form_counts(dapo, completion):
    sample = dapo.get_sample(0)
    assert sample.answer == "5"
    result = dapo.compute_reward(completion + "<eos>", sample, "<eos>")
    assert (result.total_reward, result.sample_metrics) == (1.0, {"correct": 1.0, "answered": 1.0})


@pytest.mark.parametrize(
    ("completion", "answered"),
    [("Answer: 5\nAnswer: 7", 1.0), ("Answer: 5 or 6", 1.0), (r"\boxed{5}" + "\nAnswer: 6", 1.0), ("Answer:", 0.0),
     ("The answer is 5.", 0.0), ("<think>Answer: 5</think>", 0.0), ("", 0.0)],
)  # fmt: skip
def test_another_answer_or_form_earns_nothing(dapo, completion, answered):
    result = dapo.compute_reward(completion, dapo.get_sample(0))
    assert (result.total_reward, result.sample_metrics) == (0.0, {"correct": 0.0, "answered": answered})
