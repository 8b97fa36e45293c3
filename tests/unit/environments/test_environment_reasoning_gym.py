"""`reasoning_gym:TASK`: the real package, from a name in the configuration to its score."""

import pytest

from telescope.environments.reasoning_gym.environment import ReasoningGym
from telescope.environments.registry import ENVIRONMENTS, get_environment, list_environments
from telescope.errors import UserError
from telescope.evals.base import get_eval


def make(task: str, **kwargs) -> ReasoningGym:
    environment = get_environment(f"reasoning_gym:{task}", **{"size": 4, **kwargs})
    assert isinstance(environment, ReasoningGym)
    return environment


def prompts(environment: ReasoningGym) -> list:
    return [environment.get_sample(i).prompt for i in range(len(environment))]


def score(environment: ReasoningGym, answer: str, item: int = 0) -> float:
    return environment.compute_reward(f"So <answer>{answer}</answer>", environment.get_sample(item)).total_reward


@pytest.mark.parametrize("task", ["chain_sum", "list_functions", "pool_matrix"])
def test_questions_depend_on_the_seed_alone(task):
    assert prompts(make(task, seed=5)) == prompts(make(task, seed=5)) != prompts(make(task, seed=6))


def test_an_answer_gets_the_score_of_the_task():
    environment = make("chain_sum", options={"min_terms": 3, "max_terms": 3})
    for item in range(len(environment)):
        sample = environment.get_sample(item)
        assert str(sample.prompt).count("+") + str(sample.prompt).count(" - ") == 2
        assert score(environment, sample.answer, item) == 1.0
        assert score(environment, "none", item) == 0.0
        unanswered = environment.compute_reward(sample.answer, sample)
        assert (unanswered.total_reward, unanswered.sample_metrics["answered"]) == (0.0, 0.0)
        guessed = f"<think>Is it <answer>{sample.answer}</answer>?</think> I do not know."
        assert environment.compute_reward(guessed, sample).total_reward == 0.0
    assert environment.name == "reasoning_gym:chain_sum"
    assert "<answer>" in environment.build_messages("?")[-1]["content"]


def test_answers_with_several_solutions_and_unreadable_ones_are_scored():
    assert score(make("countdown", seed=1), make("countdown", seed=1).get_sample(0).answer) == 1.0
    factors = make("prime_factorization")  # whose score raises on words
    assert score(factors, "banana") == 0.0 < score(factors, factors.get_sample(0).answer)


@pytest.mark.parametrize("task", ["countdown", "simple_integration", "n_queens", "spiral_matrix"])
def test_an_answer_is_never_run_as_code(task, tmp_path):
    file = tmp_path / "written"
    for code in (f"open({str(file)!r}, 'w')", f"__import__('pathlib').Path({str(file)!r}).touch()"):
        assert score(make(task), code) < 0.5
    assert not file.exists()


def test_a_task_is_also_an_eval():
    assert len(get_eval("reasoning_gym:chain_sum", size=3)) == 3


@pytest.mark.parametrize(("name", "kwargs", "message"), [
    ("reasoning_gym:chain_sam", {}, "Did you mean 'chain_sum'"),
    ("reasoning_gym", {}, "has no task ''"),
    ("reasoning_gym:chain_sum", {"options": {"max_term": 3}}, "Did you mean 'max_terms'"),
])  # fmt: skip
def test_a_wrong_name_or_option_says_what_there_is(name, kwargs, message):
    with pytest.raises(UserError, match=message):
        len(get_environment(name, **kwargs))


def test_a_task_is_taken_by_folders_that_say_so_and_otherwise_names_a_class(tmp_path, monkeypatch):
    assert ENVIRONMENTS.check("reasoning_gym:chain_sum").task == "chain_sum"
    assert "reasoning_gym" in list_environments()
    code = "from telescope.environments.countdown.environment import CountdownEnvironment as Mine\n"
    (tmp_path / "countdown.py").write_text(code)  # a module with the name of a folder that takes no task
    monkeypatch.syspath_prepend(tmp_path)
    assert ENVIRONMENTS.check("countdown:Mine").class_name == "Mine"
