"""Errors on the terminal."""

from telescope.cli import main
from telescope.errors import ConfigError


def test_a_problem_is_printed_once_and_without_control_sequences(monkeypatch, capsys):
    def refuse(arguments):
        raise ConfigError("template is \x1b[31mred\ntemplate is red")

    monkeypatch.setattr(main, "_dispatch", refuse)
    assert main.main(["train"]) == main.EXIT_BAD_INPUT
    assert capsys.readouterr().err == "telescope: template is red\n"
