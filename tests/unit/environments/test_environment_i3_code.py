"""Problems and comparisons of the code environment, without a sandbox."""

import json

import pytest
from tests.unit.environments.fake_hub import serve_rows

from telescope.environments.arguments import known_arguments
from telescope.environments.base import Environment
from telescope.environments.i3_code.environment import expected_digests
from telescope.environments.i3_code.runner import canonical_text, canonical_value, digest, run_test
from telescope.environments.registry import environment_class, get_environment
from telescope.errors import UserError

KEY = "avg@8_qwen3_4b_thinking_2507"


def row(number, share, **tests):
    info = json.dumps({"tests": json.dumps(tests), "source": "x"})
    return {"question": f"Problem {number}", "info": info, KEY: share}


@pytest.fixture
def hub(monkeypatch):
    rows = [
        row(0, 0.1, inputs=["1\n"], outputs=["2\n"]),
        row(1, 0.5, inputs=[["3", "4"]], outputs=[["5", "6"]]),
        row(2, 0.9, inputs=['[1, 2]\n"x"', [[3], "y"]], outputs=["[1]", [2]], fn_name="f"),
        row(3, 0.5, inputs=[str(i) for i in range(40)], outputs=[str(i) for i in range(40)]),
        row(4, 0.5, inputs=[], outputs=[]),
    ]
    return serve_rows(monkeypatch, lambda name, subset, split: rows)


def test_rows_of_the_hub_become_problems_with_texts_or_arguments(hub):
    environment = get_environment("i3_code")
    samples = [environment.get_sample(i) for i in range(len(environment))]
    assert hub.requested == [("PrimeIntellect/INTELLECT-3-RL", "code", "train")]
    assert [sample.prompt for sample in samples] == [f"Problem {i}" for i in range(4)]
    assert samples[1].metadata["tests"] == {"inputs": ["3\n4"], "outputs": ["5\n6"]}
    assert samples[2].metadata["tests"]["inputs"] == [[[1, 2], "x"], [[3], "y"]]
    chosen = samples[3].metadata["tests"]
    assert len(chosen["inputs"]) == 15 and chosen["inputs"] == chosen["outputs"]


def test_difficulty_order_and_number_are_chosen(hub):
    middle = get_environment("i3_code", difficulty_key=KEY, min_difficulty=0.2, max_difficulty=0.8, max_num_tests=2)
    assert [middle.get_sample(i).metadata["difficulty"] for i in range(len(middle))] == [0.5, 0.5]
    assert len(middle.get_sample(1).metadata["tests"]["inputs"]) == 2
    shuffled = (get_environment("i3_code", shuffle=True, seed=seed) for seed in (1, 1, 2, 3))
    orders = [[environment.get_sample(i).prompt for i in range(4)] for environment in shuffled]
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) > 1
    with pytest.raises(UserError, match="difficulty_key"):
        len(get_environment("i3_code", min_difficulty=0.5))
    with pytest.raises(UserError, match=r"no problem with tests"):
        len(get_environment("i3_code", difficulty_key=KEY, min_difficulty=2))


def test_own_problems_have_three_difficulties():
    assert len(get_environment("i3_code", dataset="own")) == 60
    hard = get_environment("i3_code", dataset="own", difficulty_key="difficulty", min_difficulty=3)
    assert len(hard) == 18


@pytest.mark.parametrize(
    ("printed", "expected", "is_right"),
    [
        ("1  2 \n\n3", "1 2\n3\n", True), ("0.50", "0.5", True), ("-0.0 1.0", "0 1", True), ("a\r\nb", "a\nb", True),
        ("1 2", "1\n2", False), ("12", "1 2", False), ("1.5", "1.25", False), ("A", "a", False), ("", "0", False),
        ("0.30000000000000004", "0.3", True), ("0.3333333333333333", "0.333333333333", True),
        ("1e-05", "0.00001", True), ("0.3333333", "0.333333", False), ("1e5", "100000", False),
    ],
)  # fmt: skip
def test_outputs_may_differ_in_whitespace_zeros_or_the_rounding_of_floats(printed, expected, is_right):
    assert (digest(canonical_text(printed)) in expected_digests(expected, is_value=False)) is is_right


@pytest.mark.parametrize(
    ("value", "expected", "is_right"),
    [
        ([1, 2], [1, 2], True), (3, [3], True), ((1, "a"), [1, "a"], True), (2.0, 2, True), ([1], "[1]", True),
        ("x", "x", True), ([2, 1], [1, 2], False), ("3", 3, False), (True, 1, False), (None, [], False),
        ([0.1 + 0.2], [0.3], True), (0.1 + 0.7, 0.8, True), (0.333333, 0.3333333, False),
    ],
)  # fmt: skip
def test_a_value_is_right_as_it_is_in_a_list_or_as_json(value, expected, is_right):
    assert (digest(canonical_value(value)) in expected_digests(expected, is_value=True)) is is_right


def test_a_function_may_use_a_dataclass_whose_annotations_are_texts():
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Point:\n    x: int\n\ndef solve(x):\n    return Point(x).x + 1\n"
    )
    result = run_test(program, [3], "solve", seconds=60.0, memory_bytes=2**31)
    assert (result["status"], result["output"]) == ("ok", "4"), result["stderr"]


def test_a_method_needs_no_imports_that_leet_code_has():
    program = "class Solution:\n    def solve(self, x: List[int]) -> int:\n        return math.gcd(*Counter(x))\n"
    result = run_test(program, [[4, 6]], "solve", seconds=60.0, memory_bytes=2**31)
    assert (result["status"], result["output"]) == ("ok", "2"), result["stderr"]


def test_files_of_others_have_keyword_arguments_that_are_known():
    words = (
        "provider provider_kwargs pool_size max_concurrent_creates timeout_minutes timeout_per_test environment_vars "
        "docker_image cpu memory_mb disk_size_gb gpu_count difficulty_key min_difficulty max_difficulty max_num_tests "
        "random_seed team_id shuffle seed dataset_name dataset_subset dataset_split system_prompt instruction_prompt"
    )
    assert set(words.split()) <= known_arguments(environment_class("i3_code"), Environment)
    environment = get_environment("i3_code", provider="prime", team_id="t1", timeout_minutes=5, docker_image="python:3")
    config = environment.sandbox_config
    assert (config.extra, config.timeout_seconds, config.image) == ({"team_id": "t1"}, 300, "python:3")
