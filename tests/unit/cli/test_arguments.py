"""A command's own arguments among the flags of fields."""

from __future__ import annotations

import pytest

from telescope.cli.main import HELP, Option, take_own
from telescope.errors import ConfigError

OPTIONS = {
    **HELP,
    "--config": Option("a file", ("-c",)),
    "--max-size": Option("a size"),
    "--eval": Option("x", repeats=True),
}


def test_own_arguments_are_taken_in_every_spelling_and_the_rest_stays_in_order():
    own, rest = take_own(["runs/a", "--max_size=5", "-c", "f.yaml", "--seed", "1", "--eval", "a", "--eval=b"], OPTIONS)
    assert own == {"--max-size": ["5"], "--config": ["f.yaml"], "--eval": ["a", "b"]}
    assert rest == ["runs/a", "--seed", "1"]


def test_help_is_a_switch():
    assert take_own(["-h", "--seed", "1"], OPTIONS) == ({"--help": [""]}, ["--seed", "1"])


@pytest.mark.parametrize("argv", [["--config"], ["--config", "--seed"]])
def test_a_missing_value_is_named(argv):
    with pytest.raises(ConfigError, match="--config needs a file"):
        take_own(argv, OPTIONS)


def test_an_argument_that_is_given_twice_is_refused_with_both_values():
    with pytest.raises(ConfigError, match="--config is given twice: a and b"):
        take_own(["-c", "a", "--config=b"], OPTIONS)
