"""A command's own arguments among the flags of fields."""

import pytest

from telescope.cli.main import COMMANDS, CommandParser, main
from telescope.errors import ConfigError


@pytest.fixture
def parser() -> CommandParser:
    parser = CommandParser(prog="telescope eval", takes_fields=True)
    parser.add_argument("--config", "-c")
    parser.add_argument("--max-size", type=int)
    parser.add_argument("--eval", action="append")
    return parser


def test_own_arguments_are_taken_in_every_spelling_and_the_rest_stays_in_order(parser):
    argv = ["runs/a", "--max_size=-5", "-c", "f_1.yaml", "--seed", "-1", "--eval", "a", "--b_2", "c d", "--eval=b_3"]
    fields = ["runs/a", "--seed", "-1", "--b_2", "c d"]
    own = {"max_size": -5, "config": "f_1.yaml", "eval": ["a", "b_3"]}
    assert vars(parser.parse_args(argv)) == own | {"fields": fields}


@pytest.mark.parametrize(("argv", "fields"), [
    (["--seed", "1", "runs/a"], ["--seed", "1"]),
    (["--debug", "runs/a"], ["--debug"]),
    (["--debug", "False", "runs/a"], ["--debug", "False"]),
    (["--checkpoint_every", "5", "--debug", "-c", "f.yaml", "runs/a"], ["--checkpoint_every", "5", "--debug"]),
])  # fmt: skip
def test_an_argument_after_the_flag_of_a_field_is_not_its_value(parser, argv, fields):
    assert parser.parse_args(argv).fields == ["runs/a", *fields]
    parser.add_argument("model")
    own = parser.parse_args(argv)
    assert (own.model, own.fields) == ("runs/a", fields)


def test_a_word_after_one_dash_is_not_a_short_option_with_its_value(parser):
    own = parser.parse_args(["-config", "x.yaml", "--stop", "-c5"])
    assert (own.config, own.fields) == (None, ["-config", "x.yaml", "--stop", "-c5"])


@pytest.mark.parametrize(("argv", "problem"), [
    (["--config"], "--config/-c: expected one argument. `telescope eval --help` explains it"),
    (["--config", "--seed"], "--config/-c: expected one argument"),
    (["-c", "a", "--config=b"], "--config is given twice: a and b"),
    (["--max_size", "much"], "--max-size: invalid int value: 'much'"),
])  # fmt: skip
def test_an_argument_that_cannot_be_meant_is_refused(parser, argv, problem):
    with pytest.raises(ConfigError, match=problem):
        parser.parse_args(argv)


@pytest.mark.parametrize("command", [*COMMANDS, "envs try", "config show", "sandbox reap"])
def test_every_command_has_help(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    assert f"usage: telescope {command} " in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "words"), [
    (["runs", "--jsn"], "Unexpected argument '--jsn'. Did you mean --json? `telescope runs --help` lists"),
    (["envs", "list", "--jsn"], "Did you mean --json? `telescope envs list --help` lists"),
    (["doctor", "--no_hub", "--waitseconds=3"], "Did you mean --wait-seconds?"),
    (["doctor", "one"], "Unexpected argument 'one'. `telescope doctor --help`"),
    (["query", "--format", "xml"], "--format: invalid choice: 'xml'"),
    (["ui", "--port", "1", "--port", "2"], "--port is given twice: 1 and 2. Give it once"),
    (["doctor", "--cluster", "--nodes", "0"], "--nodes: it is 0; set it to 1 or more"),
    (["doctor", "--cluster", "--wait-seconds", "-1"], "--wait-seconds: it is -1; set it to 0 or more"),
    (["envs", "try", "wordle", "--items", "0"], "--items: it is 0; set it to 1 or more"),
    (["envs", "try", "wordle", "--temperature", "inf"], "--temperature: it is inf; set it to 0 or more"),
    (["envs", "try", "wordle", "--items", "two"], "--items: invalid int value: 'two'"),
    (["envs", "check", "wordle", "--samples", "-1"], "--samples: it is -1; set it to 1 or more"),
    (["compact"], "the following arguments are required: RUN. `telescope compact --help` explains it"),
    (["verify", "--template", "--json", "v.json"], "--template makes none. Leave one of them out"),
    (["convert", "runs/a", "--private"], "--private is for --push-to-hub NAME"),
    (["--verison"], "Did you mean --version?"),
])  # fmt: skip
def test_a_usage_error_names_the_fix(argv, words, capsys):
    assert main(argv) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "locked/f.json", "locked/new.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "f.json").touch()
    monkeypatch.setattr("os.access", lambda path, mode: "locked" not in str(path))
    assert main(["eval", "runs/a", "--json", str(tmp_path / name)]) == 2
    assert ("is a folder" if not name else "may not be written") in capsys.readouterr().err
