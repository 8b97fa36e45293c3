"""Mathematical answers are compared: equal ones, wrong ones, and attacks on the comparison."""

import pytest

from telescope.environments import math_verifier
from telescope.environments.parsers import verify_math_answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("42", "42"),
        ("0.5", r"\frac{1}{2}"),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"$\sqrt{8}$", r"2\sqrt{2}"),
        ("x = 3", "3"),
        ("2x+1", "1+2x"),
        (r"50\%", "0.5"),
        (r"\{1, 2\}", r"\{2, 1\}"),
        (r"(-\infty, 3]", r"(-\infty,3]"),
        ("1,000", "1000"),
        (r"1\,000\,000", "1,000,000"),
        (r"12\ 345", r"12,\!345"),
        ("120\u00b0", r"120^\circ"),
        ("June 20", r"\text{June 20}"),
        ("2516_{8}", "2516_8"),
        (r"\text{Monday}", "Monday"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ],
)
def test_equal_answers_are_equal_however_they_are_written(answer, expected):
    assert verify_math_answer(answer, expected, timeout_seconds=60.0)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "4",
        "3 or 4",
        r"3 \text{ or } 4",
        "1,2,3,4",
        "3;4",
        "3 = 4",
        r"3 \neq 4",
        r"\{1,2,3\}",
        r"3} \boxed{4",
        r"\boxed{3}",
        "$3$ $4$",
        "x",
        r"\infty",
        "{3}{4}",
        r"\text{3}4",
        "\u0663",
        "\ud800",
        "3" * 2000,
        "{" * 500,
        "__import__('os').system('true')",
    ],
)
def test_other_texts_are_not_equal_to_the_answer(answer):
    assert not verify_math_answer(answer, "3", timeout_seconds=60.0)


def test_numbers_in_different_bases_differ():
    assert not verify_math_answer("2516_9", "2516_8", timeout_seconds=60.0)


@pytest.mark.parametrize("answer", ["9^{9^{9^9}}", "95^{97^{99}}", r"\prod_{i=1}^{10^9} i"])
def test_an_endless_comparison_is_wrong_and_the_next_one_works(answer):
    assert verify_math_answer("0.5", r"\frac12", timeout_seconds=60.0)
    before = math_verifier._checker._process.pid
    assert not verify_math_answer(answer, "3", timeout_seconds=0.5)
    assert verify_math_answer("0.25", r"\frac14", timeout_seconds=60.0)
    assert math_verifier._checker._process.pid != before
