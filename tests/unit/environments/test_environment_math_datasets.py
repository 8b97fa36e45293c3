r"""`dapo_math` and `deepscaler`: their rows, their form of an answer, and the reward of `hendrycks_math`."""

from __future__ import annotations

import pytest
from tests.unit.environments.fake_hub import serve_rows

from telescope.environments.math_problems import INSTRUCTION_PROMPT
from telescope.environments.registry import get_environment
from telescope.errors import UserError

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


@pytest.mark.parametrize(
    ("name", "missing"), [("dapo_math", "prompt, reward_model"), ("deepscaler", "problem or question")]
)
def test_a_dataset_without_its_columns_is_refused(monkeypatch, name, missing):
    serve_rows(monkeypatch, lambda *_: [{"text": "1 + 1?", "answer": "2"}])
    with pytest.raises(UserError, match=f"{name}: .*'a/b'.* has no column {missing}. It has: text, answer"):
        get_environment(name, dataset_name="a/b").get_sample(0)


@pytest.mark.parametrize("name", ["dapo_math", "deepscaler"])
def test_the_shipped_problems_replace_only_the_default_dataset(monkeypatch, caplog, name):
    serve_rows(monkeypatch, ConnectionError("no network"))
    environment = get_environment(name, num_samples=5, verify_timeout_seconds=60.0)
    assert len(environment) == 5
    assert f"{name}: dataset is 'auto'" in caplog.text
    assert "5 shipped problems replace it" in caplog.text
    for sample in environment._loaded():
        assert environment.compute_reward(f"\\boxed{{{sample.answer}}}", sample).total_reward == 1.0
    for kwargs in ({"dataset": "hub"}, {"dataset_name": "someone/exams"}, {"dataset_split": "test"}):
        with pytest.raises(ConnectionError):
            get_environment(name, **kwargs).get_sample(0)
    with pytest.raises(UserError, match=f"{name}: dataset is 'none'; use auto, hub or own"):
        get_environment(name, dataset="none").get_sample(0)


def test_a_seed_shuffles(dapo):
    first, again = (get_environment("dapo_math", dataset="own", seed=3)._loaded() for _ in range(2))
    assert first == again != dapo._loaded()
    assert sorted(s.prompt for s in first) == sorted(s.prompt for s in dapo._loaded())


@pytest.mark.parametrize(
    "completion",
    [
        "Answer: 5",
        "So:\n\n**Answer:** $5$.",
        "**Answer: 5**",
        "answer: x = 5",
        r"Answer: \boxed{5}.",
        r"It is \boxed{5}.",
        "Answer: 7\nNo.\nAnswer: 5\nThat is all.",
        "<think>Answer: 7</think>Answer: 5",
    ],
)
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
