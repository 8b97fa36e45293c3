"""What docs/environments.md shows works as shown."""

import re
from pathlib import Path

import pytest

from telescope.environments.base import TrajectoryStep, conversation
from telescope.environments.registry import get_environment
from telescope.errors import UserError
from telescope.evals import get_eval

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()


@pytest.fixture
def shown(tmp_path):
    """The page's programs, each in its folder."""
    programs = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "\nclass " in text]
    names = ("reverse", "higher_lower", "lengths", "reverse_hard")
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
    state = environment.create_initial_state(environment.get_sample(4))
    for guess, reply in (("3", "Higher."), ("seven", "Write one digit."), ("9", "Lower.")):
        state.trajectory.append(TrajectoryStep([], guess))
        assert environment.is_done(state) == (False, None)
        assert environment.env_response(conversation(state), state)[0]["content"] == reply
    state.trajectory.append(TrajectoryStep([], "5"))
    assert environment.is_done(state) == (True, "guessed")
    state.stop_reason = "guessed"
    assert environment.compute_reward(state).total_reward == 0.25


def test_the_shown_tool_is_called(shown):
    environment = get_environment("lengths", environments_path=[shown])
    state = environment.create_initial_state(environment.get_sample(0))
    call = '<tool_call>{"name": "convert", "arguments": {"metres": "2"}}</tool_call>'
    state.trajectory.append(TrajectoryStep([], call))
    assert environment.env_response(conversation(state), state)[0]["content"].startswith("6.56")
    state.trajectory.append(TrajectoryStep([], "They are 6.6 feet."))
    assert environment.is_done(state) == (True, "final_answer")
    assert environment.compute_reward(state).sample_metrics["convert_calls"] == 1.0


def test_the_shown_eval_runs_on_the_shown_environment(shown):
    evaluation = get_eval("reverse_hard", environments_path=[shown])
    sample = evaluation.get_sample(0)
    result = evaluation.compute_eval_metrics(f"<answer>{sample.answer}</answer>", sample)
    assert result.metrics == {"reward": 1.0, "correct": 1.0}


@pytest.mark.parametrize("name", ["countdown", "hendrycks_math", "wordle", "calculator_agent"])
def test_the_page_names_every_argument_of_what_ships_here(name):
    with pytest.raises(UserError) as raised:
        get_environment(name, no_such_argument=1)
    known = str(raised.value).split("It takes: ")[1].rstrip(".").split(", ")
    assert [argument for argument in known if f"`{argument}`" not in PAGE] == []
    assert "seed" in known
