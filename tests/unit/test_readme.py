"""The README's examples run, and the commands and files that they name exist."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from tests.model_folder import write_model_folder

from telescope.cli.main import COMMANDS, main
from telescope.config.loader import load_config
from telescope.environments.countdown.environment import CountdownEnvironment
from telescope.environments.registry import ENVIRONMENTS, get_environment
from telescope.evals import check_eval

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    return [text for of, text in found if of == language]


@pytest.fixture
def example_environment(tmp_path: Path) -> Path:
    """The folder of environments that the README describes."""
    (code,) = blocks("python")
    first_line, _, _ = code.partition("\n")
    path = tmp_path / first_line.removeprefix("# ")
    path.parent.mkdir(parents=True)
    path.write_text(code)
    return path.parent.parent


def test_the_environment_of_the_readme_scores_answers_to_the_demos_prompts_in_twenty_lines(example_environment: Path):
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("#")]) <= 20
    environment = get_environment("add_up", environments_path=[example_environment], num_samples=5)
    sample = environment.get_sample(0)
    assert len(environment) == 5
    assert environment.compute_reward(f"<answer>{sample.answer}</answer>", sample).total_reward == 1.0
    assert environment.compute_reward("<answer>1-1</answer>", sample).sample_metrics == {"correct": 0.0}
    *numbers, arrow, target = sample.prompt.split()
    assert arrow == "->"
    assert sample.prompt == CountdownEnvironment(prompt_style="short").question(map(int, numbers), int(target))


def test_the_command_that_trains_on_it_would_start(example_environment, monkeypatch, capsys):
    lines = [line for block in blocks("") for line in block.replace("\\\n", " ").splitlines()]
    (command,) = (line for line in lines if "my_environments" in line)
    program, *arguments = shlex.split(command)
    folder = example_environment.parent
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "models").mkdir()
    write_model_folder(folder / "models" / "tiny-countdown")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("telescope.orchestrator.preflight.TRAINING_PACKAGES", ())
    monkeypatch.setattr("telescope.trainer.trial.try_model", lambda config: None)  # the README has no such model
    assert program == ".venv/bin/telescope"
    assert main([*arguments, "--dry-run", "--inference_base_port=22431"]) == 0, capsys.readouterr().err


def test_the_yaml_examples_resolve(example_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(example_environment.parent)
    for number, text in enumerate(blocks("yaml")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        loaded = load_config(path, [])
        assert loaded.config.user_set <= frozenset(yaml.safe_load(text))


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_resolves_and_names_environments_that_ship(path: Path):
    config = load_config(path, [], {}).config
    for entry in config.environments:
        ENVIRONMENTS.check(entry.name)
    for eval_entry in config.evals:
        check_eval(eval_entry.name)


def test_the_commands_make_targets_and_files_that_the_readme_names_exist():
    table = re.findall(r"^\| `telescope ([a-z-]+)", README, flags=re.MULTILINE)
    assert set(table) == set(COMMANDS)
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", README)) - {"a", "and", "sure"}:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    words = [word for block in blocks("") for word in shlex.split(block.replace("\\\n", " "), comments=True)]
    assert links
    files = [*links, *(word for word in words if word.startswith("configs/"))]
    assert [file for file in files if not (ROOT / file).exists()] == []
