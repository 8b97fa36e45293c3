r"""`math500`, `aime_2024`, `aime_2025` and `gpqa_diamond`: their rows, prompts and scores."""

import re

import pytest
from tests.unit.environments.fake_hub import serve_rows

from telescope.environments.math_problems import INSTRUCTION_PROMPT
from telescope.environments.registry import get_environment
from telescope.errors import UnreachableError, UserError
from telescope.evals import get_eval, list_evals
from telescope.evals.gpqa_diamond.eval import ANSWER_COLUMNS, INSTRUCTION_PROMPT_PRE, extract_choice

MATH_EVALS = ("math500", "aime_2024", "aime_2025")
QUESTION = {
    "Question": "Which is a noble gas?", "Correct Answer": "neon", "Incorrect Answer 1": "iron",
    "Incorrect Answer 2": "zinc", "Incorrect Answer 3": "lead", "Record ID": "rec1",
}  # fmt: skip


def test_the_benchmarks_are_found_and_a_near_name_is_suggested():
    assert {*MATH_EVALS, "gpqa_diamond"} <= set(list_evals())
    with pytest.raises(UserError, match=r"There is no eval 'math-500'\. Did you mean 'math500'\?"):
        get_eval("math-500")


@pytest.mark.parametrize("name", MATH_EVALS)
def test_every_own_item_is_solved_by_its_answer_and_by_no_formula_of_it(name):
    evaluation = get_eval(name, dataset="own", verify_timeout_seconds=60.0)
    assert len(evaluation) >= 5
    for index in range(len(evaluation)):
        sample = evaluation.get_sample(index)
        scores = evaluation.compute_eval_metrics(f"<think>?</think>\\boxed{{{sample.answer}}}<eos>", sample, "<eos>")
        assert scores.metrics == {"reward": 1.0, "correct": 1.0, "boxed": 1.0}
        for formula in re.findall(r"\$([^$]+)\$", sample.prompt):
            assert evaluation.compute_eval_metrics(f"\\boxed{{{formula}}}", sample).metrics["correct"] == 0.0


def test_leading_zeros_of_an_answer_do_not_matter():
    evaluation = get_eval("aime_2024", dataset="own", verify_timeout_seconds=60.0)
    sample = evaluation.get_sample(2)
    assert sample.answer == "073"
    assert evaluation.compute_eval_metrics(r"\boxed{73}", sample).metrics["correct"] == 1.0
    assert evaluation.compute_eval_metrics(r"\boxed{730}", sample).metrics["correct"] == 0.0


@pytest.mark.parametrize(("name", "requested"), [
    ("math500", [("HuggingFaceH4/MATH-500", None, "test")]),
    ("aime_2024", [("HuggingFaceH4/aime_2024", None, "train")]),
    ("aime_2025", [("opencompass/AIME2025", part, "test") for part in ("AIME2025-I", "AIME2025-II")]),
])  # fmt: skip
def test_the_hubs_rows_become_the_items(monkeypatch, name, requested):
    key = "question" if name == "aime_2025" else "problem"
    hub = serve_rows(monkeypatch, lambda _, subset, split: [{key: f"{subset} {n}?", "answer": n} for n in range(3)])
    evaluation = get_eval(name)
    prompts = [f"{subset} {n}?" for _, subset, _ in requested for n in range(3)]
    assert [s.prompt for s in evaluation._loaded()] == prompts
    assert hub.requested == requested
    other = get_eval(name, dataset_name="someone/exams", dataset_split="dev", num_samples=2)
    assert len(other) == 2
    assert hub.requested[-1] == ("someone/exams", None, "dev")


def test_an_item_of_math500_is_the_same_as_in_hendrycks_math(monkeypatch):
    from telescope.environments.serialization import sample_uid

    rows = {
        "math500": {"problem": "1 + 1?", "answer": "2", "subject": "Algebra", "level": 1, "solution": "..."},
        "hendrycks_math": {"problem": "1 + 1?", "solution": r"\boxed{2}", "type": "Algebra", "level": "Level 1"},
    }
    serve_rows(monkeypatch, lambda name, *_: [rows["math500" if "500" in name else "hendrycks_math"]])
    trained = get_environment("hendrycks_math", dataset="hub", dataset_subset="algebra")
    assert sample_uid(get_eval("math500").get_sample(0)) == sample_uid(trained.get_sample(0))


def test_the_instruction_follows_the_problem_and_may_be_replaced():
    messages = [{"role": "user", "content": f"Q?\n\n{INSTRUCTION_PROMPT}"}]
    assert get_eval("math500").build_messages("Q?") == messages
    replaced = get_eval("aime_2024", instruction_prompt_post="Box it.", system_prompt="S")
    assert replaced.build_messages("Q?") == [
        {"role": "system", "content": "S"}, {"role": "user", "content": "Q?\n\nBox it."}
    ]  # fmt: skip
    assert get_eval("aime_2025", instruction_prompt_post=None).build_messages("Q?")[0]["content"] == "Q?"


@pytest.mark.parametrize("name", [*MATH_EVALS, "gpqa_diamond"])
def test_a_benchmark_is_not_replaced_by_own_items_without_being_asked(monkeypatch, name):
    serve_rows(monkeypatch, ConnectionError("no network"))
    with pytest.raises(UnreachableError, match=f"{name}: .*no network.*set dataset: own"):
        get_eval(name).get_sample(0)
    with pytest.raises(UserError, match=f'The eval .{name}.: dataset is "auto", but it must be one of "hub", "own"'):
        get_eval(name, dataset="auto")
    serve_rows(monkeypatch, lambda *_: [{"text": "1 + 1?"}])
    with pytest.raises(UserError, match=f"{name}: .* has no column .*It has: text"):
        get_eval(name).get_sample(0)
    with pytest.raises(UserError, match=r"'dataset_nme'\. Did you mean 'dataset_name'\?"):
        get_eval(name, dataset_nme="a/b")


def test_a_question_has_its_choices_in_an_order_that_depends_on_seed_and_question_alone(monkeypatch):
    rows = [QUESTION | {"Question": f"Question {n}?"} for n in range(40)]
    hub = serve_rows(monkeypatch, lambda *_: rows)
    first = get_eval("gpqa_diamond")._loaded()
    assert hub.requested == [("Idavidrein/gpqa", "gpqa_diamond", "train")]
    assert {sample.answer for sample in first} == set("ABCD")
    serve_rows(monkeypatch, lambda *_: rows[::-1])
    assert get_eval("gpqa_diamond")._loaded() == first[::-1]
    shuffled = get_eval("gpqa_diamond", shuffle_seed=1)._loaded()
    assert {s.answer for s in shuffled} == set("ABCD")
    assert [s.answer for s in shuffled] != [s.answer for s in first[::-1]]


def test_the_answer_is_the_letter_of_the_correct_choice(monkeypatch):
    serve_rows(monkeypatch, lambda *_: [QUESTION])
    (sample,) = get_eval("gpqa_diamond", shuffle_seed=5)._loaded()
    assert sample.prompt.startswith(f"{INSTRUCTION_PROMPT_PRE}\n\nWhich is a noble gas?\n\nA) ")
    lines = sample.prompt.splitlines()[-4:]
    assert [line[:3] for line in lines] == ["A) ", "B) ", "C) ", "D) "]
    assert {line[3:] for line in lines} == {QUESTION[column] for column in ANSWER_COLUMNS}
    assert f"{sample.answer}) neon" in lines
    (bare,) = get_eval("gpqa_diamond", shuffle_seed=5, instruction_prompt_pre=None)._loaded()
    assert bare.prompt == sample.prompt.removeprefix(f"{INSTRUCTION_PROMPT_PRE}\n\n")


def test_own_questions_are_scored_by_their_letter():
    evaluation = get_eval("gpqa_diamond", dataset="own", system_prompt="S")
    assert len(evaluation) >= 4
    sample = evaluation.get_sample(0)
    assert evaluation.build_messages(sample.prompt)[0] == {"role": "system", "content": "S"}
    wrong = next(letter for letter in "ABCD" if letter != sample.answer)
    for text, metrics in (
        (f"<think>Answer: {wrong}</think>Answer: {sample.answer}<eos>", {"correct": 1.0, "answered": 1.0}),
        (f"Answer: {wrong}", {"correct": 0.0, "answered": 1.0}),
        ("I cannot tell.", {"correct": 0.0, "answered": 0.0}),
    ):
        assert evaluation.compute_eval_metrics(text, sample, "<eos>").metrics == metrics


@pytest.mark.parametrize(("text", "letter"), [
    (r"\boxed{B}", "B"), (r"$\boxed{\text{B}}$", "B"), (r"\boxed{(B)}", "B"), (r"\boxed{B) 880 m}", "B"),
    ("Answer: B", "B"), ("**Answer:** (B)", "B"), ("The correct answer is **B**.", "B"), ("Answer: $B$", "B"),
    ("Answer: C\nNo.\nAnswer: B.", "B"), ("Answer: B) 880 m, not A", "B"), ("Answer: B\n\nA is too small.", "B"),
    ("The answer is option B.", "B"), (r"Answer: \text{B}", "B"), (r"Answer: $\mathbf{(B)}$", "B"),
    (r"Answer: \text{A} or \text{B}", ""), ("Answer: $A$ or $B$", ""), ("Answer: option A or option B", ""),
    (r"Answer: C, so \boxed{B}", "B"), ("ANSWER: B", "B"), ("Answer: A or B", ""), ("Answer: A, B", ""),
    (r"\boxed{A or B}", ""), ("answer: Because", ""), (r"\boxed{880}", ""), ("Answer: b", ""), ("B", ""), ("", ""),
    ("Answer: B\nAnswer A is too small.", "B"), ("### Answer\nB", "B"), ("The answer is B, and answer C is not.", "B"),
    ("Answer: B\nBut no.\nCorrect answer = C", "C"), ("The answer is A if x>0. Final answer C", "C"),
    ("My answer is B.\n**Answer C**", "C"), ("Answer: B, unlike answer C.", "B"), ("Answer A is correct", "A"),
    ("The answer is B. My final answer C would be too small.", "B"),
    ("Answer: B. The correct answer C, since 1<2", "C"),
])  # fmt: skip
def test_the_last_stated_choice_is_the_answer(text, letter):
    assert extract_choice(text) == letter
