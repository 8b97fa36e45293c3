"""Errors on the terminal."""

import os
import subprocess
import sys

import pytest

from telescope.cli import main
from telescope.errors import ConfigError


def test_a_problem_is_printed_once_and_without_control_sequences(monkeypatch, capsys):
    def refuse(arguments):
        raise ConfigError("template is \x1b[31mred\ntemplate is red")

    monkeypatch.setattr(main, "_dispatch", refuse)
    assert main.main(["train"]) == main.EXIT_BAD_INPUT
    assert capsys.readouterr().err == "telescope: template is red\n"


def test_a_connection_that_breaks_does_not_end_a_command_as_if_it_were_done(monkeypatch, capfd):
    def lose(arguments):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(main, "_dispatch", lose)
    with pytest.raises(BrokenPipeError):
        main.main(["eval"])


def test_a_locale_without_a_character_gets_its_number():
    command = [sys.executable, "-m", "telescope", "config", "explain", "interleaved_rollouts"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "across turns \\u2014 avoids" in " ".join(done.stdout.split())


def test_a_command_whose_package_is_missing_says_how_to_install_it(monkeypatch, capsys):
    def lack(arguments):
        raise ModuleNotFoundError("No module named 'absent'", name="absent.part")

    monkeypatch.setattr(main, "_dispatch", lack)
    assert main.main(["chat"]) == main.EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"telescope: {__file__}:") and "needs the package absent.part, which is not" in error
    assert "Install it, perhaps with: pip install absent. `make setup`" in error
