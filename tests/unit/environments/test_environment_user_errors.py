"""Descriptions of errors of user code, with their lines."""

import json
from pathlib import Path

import pytest

from telescope.environments.user_code import describe_error, user_code_line

HERE = Path(__file__)


def caught(function) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_in_a_library_names_the_line_that_called_it_or_one_in_the_folder_of_the_environment():
    error = caught(lambda: json.loads("?"))
    assert user_code_line(error).startswith(f"{HERE}:")
    assert describe_error(error).startswith("JSONDecodeError: Expecting value")
    assert Path(user_code_line(error, Path(json.__file__).parent)).name.startswith("decoder.py:")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(("error", "text"), [
    (ValueError("\ud800"), "ValueError: ?"),
    (SystemExit(), "SystemExit"),
    (
        AttributeError("'coroutine' object has no attribute 'text'"),
        "AttributeError: 'coroutine' object has no attribute 'text' (a call of an async function lacks `await`)",
    ),
    (Unprintable(), "Unprintable: (its __str__ raises RuntimeError)"),
    (
        ModuleNotFoundError("No module named 'absent.part'", name="absent.part"),
        "ModuleNotFoundError: No module named 'absent.part' (this code needs it; install it, perhaps with: "
        "pip install absent)",
    ),
    (
        LookupError("\n***\n  Resource 'words' not found.\n  >>> nltk.download('words')\n"),
        "LookupError: nltk has no data 'words' (this code needs it; install it: python -m nltk.downloader words)",
    ),
], ids=["odd text", "no text", "no await", "text that raises", "no package", "no data"])  # fmt: skip
def test_an_error_without_a_traceback_is_described(error, text):
    assert describe_error(error) == text


def test_a_long_error_is_cut_and_the_first_of_a_group_and_a_stop_iteration_are_described():
    def empty():
        yield next(iter(()))

    text = describe_error(ValueError("x" * 5_000_000))
    assert len(text) < 2_100 and text.endswith("(5000012 characters in all)")
    group = ExceptionGroup("one", [ExceptionGroup("two", [ValueError("inner"), KeyError("other")])])
    assert describe_error(group).startswith("ValueError: inner")
    error = caught(lambda: list(empty()))
    assert isinstance(error, RuntimeError)
    assert describe_error(error).startswith(f"StopIteration at {HERE}:"), "with its own line"
