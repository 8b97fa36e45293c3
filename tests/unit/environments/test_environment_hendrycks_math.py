r"""MATH: the shipped problems have right answers, and only the right answer in the box is rewarded."""

import re

import pytest
from tests.unit.environments.fake_hub import serve_rows

from telescope.environments.hendrycks_math.environment import SUBJECTS
from telescope.environments.hendrycks_math.worked_out import is_worked_out
from telescope.environments.math_problems import INSTRUCTION_PROMPT
from telescope.environments.registry import get_environment
from telescope.errors import UserError


@pytest.fixture(scope="module")
def environment():
    return get_environment("hendrycks_math", dataset="own", verify_timeout_seconds=60.0)


def score(environment, completion, answer=r"\frac{3}{2}"):
    sample = next(s for s in environment._loaded() if s.answer == answer)
    return environment.compute_reward(completion, sample)


def test_every_own_problem_is_solved_by_its_own_solution(environment):
    assert len(environment) >= 40
    for index in range(len(environment)):
        sample = environment.get_sample(index)
        assert sample.metadata["level"] in range(1, 6) and sample.metadata["subject"]
        assert environment.compute_reward(f"So it is \\boxed{{{sample.answer}}}.", sample).total_reward == 1.0


@pytest.mark.parametrize("answer", [r"\frac{3}{2}", "1.5", r"\dfrac32", "3/2", r"x = \frac{3}{2}"])
def test_the_right_answer_counts_however_it_is_written(environment, answer):
    result = score(environment, f"<think>Perhaps \\boxed{{7}}?</think> It is $\\boxed{{{answer}}}$.<|im_end|>")
    assert (result.total_reward, result.sample_metrics) == (1.0, {"correct": 1.0, "boxed": 1.0})


@pytest.mark.parametrize(
    "completion",
    [
        "",
        r"\frac{3}{2}",  # no box
        r"\boxed{}",
        r"\boxed{\frac{3}{2}",  # not closed
        r"\boxed{\frac{3}{2}} no, \boxed{2}",  # the last word counts
        r"\boxed{\frac{3}{2} \text{ or } 2}",
        r"\boxed{1, 1.5, 2}",
        r"\boxed{\frac{3}{2} = 2}",
        r"<think>\boxed{\frac{3}{2}}</think>",
        r"\boxed{1\text{.5}}",
        r"\boxed{10^{10^{10}}}",
        r"\boxed{x}",
        r"\boxed{\boxed{1}.5}",
        r"\boxed{\text{the answer}}",
        "\\boxed{\u0661.\u0665}",
        "What is " + r"\boxed{?}",
    ],
)
def test_wrong_answers_earn_nothing(environment, completion):
    environment.verify_timeout_seconds = 2.0
    assert score(environment, completion).total_reward == 0.0
    environment.verify_timeout_seconds = 60.0


def test_no_problem_is_solved_by_copying_a_formula_of_it(environment):
    """math-verify takes `\\sin 150^\\circ` for 1/2, as it should, and a model that learns to copy learns nothing."""
    for index in range(len(environment)):
        sample = environment.get_sample(index)
        for formula in re.findall(r"\$([^$]+)\$", sample.prompt):
            for copied in (formula, formula.rpartition("=")[2], f"x = {formula}", f"\\left({formula}\\right)"):
                result = environment.compute_reward(f"\\boxed{{{copied}}}", sample)
                assert result.total_reward == 0.0, (sample.prompt, copied)


@pytest.mark.parametrize(
    ("answer", "expected", "problem", "accepted"),
    [
        (r"\binom{8}{4}", "70", "", False), ("17^2 - 15^2", "64", "Compute 17^2 - 15^2.", False),
        ("5!", "120", "", False), (r"\sqrt{4}", "2", "", False), (r"\int_0^1 2x\,dx", "1", "", False),
        (r"\log_2 8 + x", "x + 3", "", False), (r"\operatorname{lcm}(2, 3)", "6", "", False),
        (r"\dfrac{84}{ 144}", r"\frac{7}{12}", r"Simplify $\frac{84}{144}$.", False),
        ("0.125", r"\frac{1}{8}", "Write 0.125 as a fraction.", False),
        ("2(y + 1)", "2y + 2", "Let $x=2(y+1)$. Write $x$ without parentheses.", False),
        ("(x+2)(x-5)", "x^2-3x-10", r"Expand \[(x+2)(x-5).\]", False),
        (r"x = \frac{-1}{2}", "-0.5", "Solve $2x = -1$.", True), (r"3\frac12", r"\frac72", "", True),
        (r"12{,}345\text{ cm}^2", "12345", "", True), (r"90^\circ", "90", "", True), (r"\$18.90", "18.90", "", True),
        (r"1.5 \times 10^{6}", "1500000", "", True), (r"0.\overline{3}", r"\frac{1}{3}", "", True),
        (r"\{4\}", "4", "", True), (r"\frac{\sin x}{\cos x}", r"\tan x", "", True),
        (r"\frac59 \approx 0.56", r"\frac{5}{9}", "", True), (r"\binom{8}{4} \approx 70", "70", "", False),
        (r"58,\!500", "58500", "", True), (r"5 \!\! !", "120", "", False),
        ("3+2x", "2x+3", "Let $f(x)=x$.", True), ("x+1", "1+x", "Let $3x+1=2$.", True),
        ("2^{10}", "2^{10}", "Which is larger, $2^{10}$ or $10^3$?", True), ("3", "3.0", "Round $3$.", True),
        ("1,000", "1000", "There are 1,000 people.", True), (r"\$4.50", "4.5", "Tickets cost $4.50.", True),
        ("-5", "x=-5", "Solve $f(x)=-5$.", True), ("AB = 7", "7", "If $BC = 7$ and $AC = 8$, find $AB$.", True),
        (r"r = 2\sqrt{3}", r"2\sqrt3", r"A square has the side $2\sqrt{3}$.", True), ("x^{2}", "x^2", "$x^{2}$", True),
        ("1/2", r"\frac{1}{2}", "A coin shows heads with $1/2$.", True),
        (r"P = \frac{1}{2}", r"\frac12", r"A coin shows heads with $\frac{1}{2}$.", True),
        ("12/16", r"\frac34", r"Simplify $\frac{12}{16}$.", False),
        (r"S=\sum_{n=1}^{4} n", "10", r"Compute $\sum_{n=1}^{4} n$.", False),
    ],
)  # fmt: skip
def test_another_notation_is_accepted_and_a_restatement_refused(answer, expected, problem, accepted):
    assert is_worked_out(answer, expected, problem) is accepted


def test_problems_are_chosen_by_subject_level_and_seed():
    chosen = get_environment("hendrycks_math", dataset="own", levels=[2, 3])._loaded()
    assert {sample.metadata["level"] for sample in chosen} == {2, 3}
    for subject in SUBJECTS:
        assert len(get_environment("hendrycks_math", dataset="own", dataset_subset=subject)) >= 4
    first, again = (get_environment("hendrycks_math", dataset="own", seed=3)._loaded() for _ in range(2))
    assert first == again != get_environment("hendrycks_math", dataset="own")._loaded()
    with pytest.raises(UserError, match="there is no problem"):
        get_environment("hendrycks_math", dataset="own", dataset_subset="astrology").get_sample(0)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({}, f"{INSTRUCTION_PROMPT}\n\nQ"), ({"instruction_prompt": None}, "Q"),
        ({"instruction_prompt": "Before.", "instruction_prompt_post": "\nAfter."}, "Before.\n\nQ\n\nAfter."),
    ],
)  # fmt: skip
def test_an_instruction_stands_before_or_behind_the_problem_or_nowhere(kwargs, text):
    assert get_environment("hendrycks_math", **kwargs).build_messages("Q")[0]["content"] == text


def test_the_hubs_rows_become_samples(monkeypatch):
    unusable = {"problem": "no answer", "level": "Level ?", "type": "Algebra", "solution": "none"}
    row = {"level": "Level 4", "type": "Algebra", "solution": r"so \boxed{4}"}
    hub = serve_rows(monkeypatch, lambda name, subset, split: [{"problem": f"P {subset}", **row}, unusable])
    samples = get_environment("hendrycks_math", dataset="hub")._loaded()
    assert [subset for _, subset, _ in hub.requested] == list(SUBJECTS)
    assert [(s.prompt, s.answer, s.metadata["level"]) for s in samples[:1]] == [("P algebra", "4", 4)]
    assert len(samples) == len(SUBJECTS)
    serve_rows(monkeypatch, lambda *_: [{"problem": "1 - 1?", "answer": 0}])
    assert get_environment("hendrycks_math", dataset_name="someone/sums").get_sample(0).answer == "0"
