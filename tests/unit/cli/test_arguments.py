"""A command's own arguments among the flags of fields."""

from __future__ import annotations

import pytest

from telescope.cli.main import OwnParser
from telescope.errors import ConfigError


@pytest.fixture
def parser() -> OwnParser:
    parser = OwnParser(prog="telescope eval")
    parser.add_argument("--config", "-c")
    parser.add_argument("--max-size", type=int)
    parser.add_argument("--eval", action="append")
    return parser


def test_own_arguments_are_taken_in_every_spelling_and_the_rest_stays_in_order(parser):
    argv = ["runs/a", "--max_size=-5", "-c", "f_1.yaml", "--seed", "-1", "--eval", "a", "--b_2", "c d", "--eval=b_3"]
    own, rest = parser.take(argv)
    assert vars(own) == {"max_size": -5, "config": "f_1.yaml", "eval": ["a", "b_3"]}
    assert rest == ["runs/a", "--seed", "-1", "--b_2", "c d"]


def test_a_word_after_one_dash_is_not_a_short_option_with_its_value(parser):
    own, rest = parser.take(["-config", "x.yaml", "--stop", "-c5"])
    assert vars(own)["config"] is None
    assert rest == ["-config", "x.yaml", "--stop", "-c5"]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--config"], "--config/-c: expected one argument. `telescope eval --help` explains it"),
        (["--config", "--seed"], "--config/-c: expected one argument"),
        (["-c", "a", "--config=b"], "--config is given twice: a and b"),
        (["--max_size", "much"], "--max-size: invalid int value: 'much'"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused(parser, argv, problem):
    with pytest.raises(ConfigError, match=problem):
        parser.take(argv)
