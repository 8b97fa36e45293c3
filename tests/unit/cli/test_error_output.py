"""Errors on the terminal."""

from telescope.cli import main
from telescope.errors import ConfigError


def test_a_problem_is_printed_once_and_without_control_sequences(monkeypatch, capsys):
    def refuse(arguments):
        raise ConfigError("template is \x1b[31mred\ntemplate is red")

    monkeypatch.setattr(main, "_dispatch", refuse)
    assert main.main(["train"]) == main.EXIT_BAD_INPUT
    assert capsys.readouterr().err == "telescope: template is red\n"


def test_a_command_whose_package_is_missing_says_how_to_install_it(monkeypatch, capsys):
    def lack(arguments):
        raise ModuleNotFoundError("No module named 'absent'", name="absent.part")

    monkeypatch.setattr(main, "_dispatch", lack)
    assert main.main(["chat"]) == main.EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"telescope: {__file__}:") and "needs the package absent.part, which is not" in error
    assert "Install it, perhaps with: pip install absent. `make setup`" in error
