"""The examples of docs/environments.md and docs/tools.md work."""

import re
from pathlib import Path

import pytest
from tests.unit.environments.turns import play, step

from telescope.environments.arguments import known_arguments
from telescope.environments.base import Environment
from telescope.environments.records import conversation
from telescope.environments.registry import environment_class, get_environment
from telescope.evals import get_eval

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "environments.md").read_text() + (DOCS / "tools.md").read_text()


@pytest.fixture
def shown(tmp_path):
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    programs = [text for text in programs if "\nclass " in text and "SandboxTools" not in text]
    names = ("reverse", "higher_lower", "reverse_hard", "lengths")
    for name, source in zip(names, programs, strict=True):
        file = "eval.py" if "(Eval)" in source else "environment.py"
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(source)
    return tmp_path


def test_the_shown_environment_runs_with_the_shown_arguments(shown):
    environment = get_environment("reverse", environments_path=[shown], words=["galaxy"], instruction_prompt="I")
    sample = environment.get_sample(0)
    assert environment.compute_reward("<answer>yxalag</answer>", sample).total_reward == 1.0
    assert environment.compute_reward("yxalag", sample).total_reward == 0.0


def test_the_shown_conversation_can_be_played(shown):
    environment = get_environment("higher_lower", environments_path=[shown])
    state, replies = play(environment, environment.get_sample(4), "3", "seven", "9", "5")
    assert replies == [["Higher."], ["Write one digit."], ["Lower."]]
    assert state.stop_reason == "guessed"
    assert environment.compute_reward(state).total_reward == 0.25


def test_the_shown_tool_is_called(shown):
    environment = get_environment("lengths", environments_path=[shown])
    state = environment.create_initial_state(environment.get_sample(0))
    call = '<tool_call>{"name": "convert", "arguments": {"meters": "2"}}</tool_call>'
    state.trajectory.append(step(call))
    assert environment.env_response(conversation(state), state)[0]["content"].startswith("[convert] 6.56")
    state.trajectory.append(step("They are 6.6 feet."))
    assert environment.is_done(state) == (True, "final_answer")
    assert environment.compute_reward(state).sample_metrics["convert_calls"] == 1


def test_the_shown_eval_runs_on_the_shown_environment(shown):
    evaluation = get_eval("reverse_hard", environments_path=[shown])
    sample = evaluation.get_sample(0)
    result = evaluation.compute_eval_metrics(f"<answer>{sample.answer}</answer>", sample)
    assert result.metrics == {"reward": 1.0, "correct": 1.0}


SHIPPED = ["countdown", "hendrycks_math", "dapo_math", "deepscaler", "wordle", "calculator_agent", "i3_code"]


@pytest.mark.parametrize("name", [*SHIPPED, "terminal_tasks", "shell_countdown"])
def test_the_page_names_every_argument_of_what_ships_here(name):
    known = known_arguments(environment_class(name), Environment)
    assert [argument for argument in known if f"`{argument}`" not in PAGE] == []
    assert "seed" in known
