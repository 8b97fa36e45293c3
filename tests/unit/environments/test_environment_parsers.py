"""Parsers extract answers from completions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.environments.parsers import (
    extract_answer_tags,
    extract_boxed_answer,
    extract_code_block,
    extract_xml_tag,
    strip_think_tags,
    verify_exact_match,
)


@pytest.mark.parametrize(("text", "kept"), [
    ("no thinking", "no thinking"), ("<think>a</think> b", "b"), ("a<think>b</think>c<think>d</think>e", "ace"),
    ("began in the prompt</think>b", "b"), ("a</think>b</think>c", "c"), ("</think>a<think>cut short", "a"),
    ("[THINK]a[/THINK] b", "b"), ("<think>a<think>b</think>c", "c"), ("", ""),
])  # fmt: skip
def test_thinking_is_stripped_closed_or_not(text, kept):
    assert strip_think_tags(text) == kept


@given(st.lists(st.sampled_from(["<think>", "</think>", "x", "y "]), max_size=30).map("".join))
def test_no_think_tag_survives_unless_none_is_closed(text):
    kept = strip_think_tags(text)
    if "</think>" in text:
        assert "<think>" not in kept and "</think>" not in kept
    else:
        assert kept == text


def test_the_last_tag_counts():
    assert extract_answer_tags("<answer>1</answer> no, <answer> 2 </answer>") == "2"
    assert extract_answer_tags("<answer>1</answer><answer>2") == "1"
    assert extract_answer_tags("<answer>1<answer>2</answer>") == "2"
    assert extract_answer_tags("</answer><answer>") == ""
    assert extract_xml_tag("<a>1</a><b>2</b>", "a") == "1"


@pytest.mark.parametrize(("text", "answer"), [
    (r"so \boxed{42}.", "42"), (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{a} \boxed{cut", "a"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"{ \boxed{3} }", "3"),
    (r"} \boxed{4}", "4"), (r"\boxed{\boxed{5}}", r"\boxed{5}"), (r"\boxed {5}", "5"), (r"\boxed 5", "5"),
    (r"\fbox{5}", "5"), (r"\boxed{1} or \boxed 5x", "1"), ("none", ""), (r"\boxed{" * 100_000, ""),
])  # fmt: skip
def test_boxes_are_balanced_and_the_last_complete_one_counts(text, answer):
    assert extract_boxed_answer(text) == answer


def test_code_block_of_the_language_comes_before_an_unmarked_one():
    blocks = ("\nplain", "python\nfirst", "python\nx = 1\ny = 2", "json\n{}", "\nlast")
    text = "\ntext\n".join(f"```{block}\n```" for block in blocks)
    assert extract_code_block(text) == "x = 1\ny = 2"
    assert extract_code_block(text, "json") == "{}"
    assert extract_code_block("```\nplain\n```") == "plain"
    assert extract_code_block("```python\nnot closed") == ""
    for label in ("Python", "py", "python3", 'python title="a.py"', "`python"):
        assert extract_code_block(f"```text\nno\n```\n```{label}\nx = 1\n```") == "x = 1"
    assert extract_code_block("```py\nx = 1\n```", "py") == "x = 1"
    assert extract_code_block("~~~python\nx = '```'\n```\n~~~") == "x = '```'\n```"
    assert extract_code_block("```python\nif x:\n    f(1)```\n```json\n{}\n```") == "if x:\n    f(1)"
    assert extract_code_block("1. So:\n   ```python\n   if x:\n       f(1)\n\n  y\n   ```") == "if x:\n    f(1)\n\ny"
    assert extract_code_block("Write ```print(1)``` first.\n```print(1)```\n```\nx = 1\n```") == "x = 1"


def test_exact_match_ignores_white_space_only():
    assert verify_exact_match(" New\n York", "New York ")
    assert not verify_exact_match("newyork", "new york")
    assert not verify_exact_match("New York", "new york")
