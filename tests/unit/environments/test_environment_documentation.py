"""What docs/environments.md shows works as shown."""

import re
from pathlib import Path

import pytest

from telescope.environments.countdown.environment import CountdownEnvironment
from telescope.environments.registry import get_environment
from telescope.errors import UserError
from telescope.evals import get_eval

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()


@pytest.fixture
def shown(tmp_path):
    """The page's two programs, each in its folder."""
    environment, evaluation = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for name, file, source in (("reverse", "environment.py", environment), ("reverse_hard", "eval.py", evaluation)):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(source)
    return tmp_path


def test_the_shown_environment_runs_with_the_shown_arguments(shown):
    environment = get_environment("reverse", environments_path=[shown], words=["galaxy"], instruction_prompt="I")
    sample = environment.get_sample(0)
    assert environment.compute_reward("<answer>yxalag</answer>", sample).total_reward == 1.0
    assert environment.compute_reward("yxalag", sample).total_reward == 0.0


def test_the_shown_eval_runs_on_the_shown_environment(shown):
    evaluation = get_eval("reverse_hard", environments_path=[shown])
    sample = evaluation.get_sample(0)
    result = evaluation.compute_eval_metrics(f"<answer>{sample.answer}</answer>", sample)
    assert result.metrics == {"reward": 1.0, "correct": 1.0}


def test_the_page_names_every_argument_of_countdown():
    with pytest.raises(UserError) as raised:
        CountdownEnvironment(no_such_argument=1)
    known = str(raised.value).split("It takes: ")[1].rstrip(".").split(", ")
    assert [name for name in known if f"`{name}`" not in PAGE] == []
    assert "prompt_style" in known
