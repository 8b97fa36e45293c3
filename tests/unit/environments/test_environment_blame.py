"""Whose line an error is put down to."""

import json
from pathlib import Path

from telescope.environments.blame import describe, innermost_line

HERE = Path(__file__)


def caught(function) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_library_that_complains_is_not_blamed_but_who_called_it():
    error = caught(lambda: json.loads("?"))
    assert innermost_line(error).startswith(f"{HERE}:")
    assert describe(error).startswith("JSONDecodeError: Expecting value")


def test_a_line_in_the_folder_of_the_environment_comes_first():
    error = caught(lambda: json.loads("?"))
    assert Path(innermost_line(error, Path(json.__file__).parent)).name.startswith("decoder.py:")


def test_an_error_without_a_traceback_or_with_odd_text_is_told_too():
    assert describe(ValueError("\ud800")) == "ValueError: ?"
    assert describe(SystemExit()) == "SystemExit"
