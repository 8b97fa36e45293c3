"""Environments and evals are found by name and receive their arguments."""

import re
import sys
import textwrap
from importlib import metadata

import pytest

from telescope.environments.base import Sample
from telescope.environments.registry import ENVIRONMENTS, get_environment, list_environments
from telescope.errors import UserError
from telescope.evals import check_eval, get_eval, list_evals

PLAIN = """
    from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment

    class {name}(SingleTurnEnvironment):
        def load_dataset(self, num_samples=-1, **kwargs):
            return [Sample("a", "b"), Sample("c", "d")][: num_samples if num_samples >= 0 else None]

        def compute_reward(self, completion, sample, eos_token=""):
            return RewardResult(float(completion == sample.answer))
"""
PLAYS = """
    from telescope.environments.base import MultiTurnEnvironment, Sample

    class Plays(MultiTurnEnvironment):
        max_turns = 3

        def load_dataset(self, num_samples=-1):
            return [Sample("a", "b")]

        def env_response(self, messages, state):
            return []

        def compute_reward(self, state, eos_token=""):
            raise NotImplementedError
"""
BASE_ALONE = PLAIN.format(name="Puzzle").replace("SingleTurnEnvironment", "BaseEnvironment")


@pytest.fixture
def write(tmp_path):
    """Write `<name>/<file>` in a folder that is then an environments_path."""

    def write(name, source, file="environment.py"):
        target = tmp_path / "mine" / name / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(source))
        return tmp_path / "mine"

    return write


def test_a_folder_with_environment_py_is_an_environment_without_any_registration(write):
    path = write("my_puzzle", PLAIN.format(name="Puzzle"))
    assert {"my_puzzle", "countdown"} <= set(list_environments([path]))
    environment = get_environment("my_puzzle", environments_path=[path], num_samples=1)
    assert (environment.name, len(environment)) == ("my_puzzle", 1)
    assert len(get_environment("my-puzzle_v1.5", environments_path=[write("my-puzzle_v1.5", BASE_ALONE)])) == 2


def test_a_direct_subclass_of_the_base_is_a_single_turn_environment_and_needs_a_reward(write):
    path = write("plain_puzzle", BASE_ALONE)
    environment = get_environment("plain_puzzle", environments_path=[path], system_prompt="Be brief.")
    assert not environment.is_multi_turn
    assert [message["role"] for message in environment.build_messages("a")] == ["system", "user"]
    assert environment.compute_reward("b", environment.get_sample(0)).total_reward == 1.0
    assert get_eval("plain_puzzle", environments_path=[path]).env is not None
    path = write("no_reward", BASE_ALONE.replace("compute_reward", "reward_of"))
    with pytest.raises(UserError, match=r"'no_reward' has no compute_reward.*Subclass SingleTurnEnvironment or Multi"):
        get_environment("no_reward", environments_path=[path])


def test_a_reward_that_does_not_take_its_arguments_is_refused_with_the_form(write):
    path = write("short_reward", BASE_ALONE.replace(', eos_token=""', ""))
    form = r'Write `def compute_\w+\(self, completion, sample, eos_token=""\)`'
    with pytest.raises(
        UserError, match=rf"compute_reward of 'short_reward': got an unexpected keyword argument 'eos_token'. {form}"
    ):
        get_environment("short_reward", environments_path=[path])
    metrics = "from telescope.evals import Eval\nclass E(Eval):\n    def compute_eval_metrics(self, completion): ...\n"
    path = write("short_metrics", metrics, file="eval.py")
    with pytest.raises(UserError, match=rf"compute_eval_metrics of 'short_metrics': too many positional.* {form}"):
        get_eval("short_metrics", environments_path=[path])


@pytest.mark.parametrize(("method", "form"), [
    ("get_initial_prompt(self, sample)", "def get_initial_prompt(self, sample, tokenizer=None)"),
    ("env_response(self, state)", "def env_response(self, messages, state)"),
    ("is_done(self)", "def is_done(self, state)"),
    ("solution(self)", "def solution(self, sample)"),
    ("rollout(self, sample)", "async def rollout(self, sample, context)"),
])  # fmt: skip
def test_a_method_that_does_not_take_its_arguments_is_refused_with_the_form(write, method, form):
    written = f"async def {method}" if "rollout" in method else f"def {method}"
    path = write("short", f"{textwrap.dedent(PLAYS)}\n    {written}: ...\n")
    with pytest.raises(UserError, match=rf"{method.partition('(')[0]} of 'short': .*Write `{re.escape(form)}`"):
        get_environment("short", environments_path=[path])


@pytest.mark.parametrize(("statement", "fix"), [
    ("from helper import x", "`from .helper import ...`"),
    ("from mine_alone.helper import x", "`from .file import ...`"),
    ("from json import own", "`from .json import ...`"),
])  # fmt: skip
def test_an_import_of_a_file_of_the_folder_without_a_dot_is_explained(write, statement, fix):
    write("mine_alone", "x = 1", file="helper.py")
    write("mine_alone", "own = 1", file="json.py")
    path = write("mine_alone", f"{statement}\n{textwrap.dedent(PLAIN.format(name='P'))}")
    with pytest.raises(UserError, match=re.escape(fix)) as raised:
        get_environment("mine_alone", environments_path=[path])
    assert "pip install" not in str(raised.value)


def test_a_folder_without_the_file_and_the_folder_of_the_environment_itself_are_named(write):
    path = write("other_file", "", file="env.py")
    with pytest.raises(UserError, match=r"other_file has no environment.py"):
        get_environment("other_file", environments_path=[path])
    path = write("itself", PLAIN.format(name="P"))
    with pytest.raises(UserError, match=r"itself, which is the environment itself. Name the folder .*mine"):
        get_environment("itself", environments_path=[path / "itself"])


def test_code_of_a_rollout_that_changes_its_sample_changes_no_other(write):
    path = write("changing", PLAIN.format(name="P").replace('Sample("a", "b")', 'Sample([{"role": "user"}], "b")'))
    environment = get_environment("changing", environments_path=[path])
    sample = environment.get_sample(0)
    sample.prompt[0]["content"] = "x"
    sample.prompt.append({})
    sample.answer, sample.metadata["seen"] = "c", True
    assert environment.get_sample(0).prompt == [{"role": "user"}]
    assert environment.get_sample(0).answer == "b" and "seen" not in environment.get_sample(0).metadata


@pytest.mark.parametrize("written", ["TAKES_TASK = True", "TAKES_TASK: bool = True", "TAKES_TASK = True  # a puzzle"])
def test_a_file_that_takes_a_task_is_named_with_it(write, written):
    path = write("puzzles", f"{textwrap.dedent(PLAIN.format(name='Puzzle'))}\n{written}")
    assert get_environment("puzzles:maze", environments_path=[path]).task == "maze"


def test_files_of_a_folder_import_each_other_relatively(write):
    write("with_helper", "ANSWER = 'from the helper'", file="helper.py")
    path = write("with_helper", "from .helper import ANSWER\n" + textwrap.dedent(PLAIN.format(name="P")))
    module = sys.modules[type(get_environment("with_helper", environments_path=[path])).__module__]
    assert module.ANSWER == "from the helper"


def test_folders_of_the_same_name_in_different_places_are_separate(write, tmp_path):
    first = write("twin", PLAIN.format(name="First"))
    second = tmp_path / "other"
    (second / "twin").mkdir(parents=True)
    (second / "twin" / "environment.py").write_text(textwrap.dedent(PLAIN.format(name="Second")))
    assert type(get_environment("twin", environments_path=[first, second])).__name__ == "First"
    assert type(get_environment("twin", environments_path=[second, first])).__name__ == "Second"


def test_imported_and_abstract_classes_are_not_the_environment(write):
    path = write(
        "heirs",
        """
        from telescope.environments.countdown.environment import CountdownEnvironment
        from telescope.environments.base import Environment, SingleTurnEnvironment

        class Common(CountdownEnvironment): ...
        class Final(Common): ...
        class Unfinished(SingleTurnEnvironment): ...
        """,
    )
    assert type(get_environment("heirs", environments_path=[path])).__name__ == "Final"


@pytest.mark.parametrize(("source", "words"), [
    ("x = 1", "defines no concrete subclass of Environment; imported classes do not count"),
    (
        "from telescope.environments.base import SingleTurnEnvironment\nclass A(SingleTurnEnvironment): ...",
        r"A lacks compute_reward, load_dataset",
    ),
    (PLAIN.format(name="A") + PLAIN.format(name="B"), "defines several: A, B"),
    ("import a_module_that_is_not_there", r"cannot be imported: ModuleNotFoundError.*environment\.py:1"),
    ("def broken(:", r"environment\.py:1"),
])  # fmt: skip
def test_a_module_without_exactly_one_concrete_class_is_an_error(write, source, words):
    path = write("bad", source)
    with pytest.raises(UserError, match=words):
        get_environment("bad", environments_path=[path])


def test_unknown_names_get_a_suggestion():
    with pytest.raises(UserError, match="Did you mean 'countdown'"):
        ENVIRONMENTS.check("cuontdown")
    with pytest.raises(UserError, match="environments_path names 'nowhere'"):
        list_environments(["nowhere"])


def test_missing_packages_are_named_with_the_command_and_without_importing(write):
    path = write(
        "needy",
        """
        REQUIRED_PACKAGES: list[str] = ["numpy>=1", "no-such-package-a>=0.6", "no_such_package_b[extra]"]
        OPTIONAL_PACKAGES = ["no-such-package-c"]
        raise RuntimeError("imported")
        """,
    )
    with pytest.raises(UserError) as raised:
        ENVIRONMENTS.check("needy", [path])
    assert str(raised.value).endswith("pip install 'no-such-package-a>=0.6' 'no_such_package_b[extra]'")
    source = ENVIRONMENTS.find("needy", [path])
    assert ENVIRONMENTS.missing_packages(source, "OPTIONAL_PACKAGES") == ["no-such-package-c"]
    with pytest.raises(UserError, match="pip install"):
        get_environment("needy", environments_path=[path])
    path = write("dynamic", "REQUIRED_PACKAGES = ['a' + 'b']")
    with pytest.raises(UserError, match=r"environment\.py:1: REQUIRED_PACKAGES must be a list of strings"):
        ENVIRONMENTS.check("dynamic", [path])


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"# coding: latin-1\n# caf\xe9\n", b"# caf\xe9\n"])
def test_a_file_of_another_encoding_is_read_as_python_reads_it(write, start):
    path = write("my_puzzle", PLAIN.format(name="Puzzle"))
    file = path / "my_puzzle" / "environment.py"
    file.write_bytes(start + b"TAKES_TASK = True\n" + file.read_bytes())
    assert len(get_environment("my_puzzle:a", environments_path=[path])) == 2
    file.write_bytes(b"x = '\xe9'\n")
    with pytest.raises(UserError, match=r"environment.py:1: .*can't decode byte 0xe9"):
        get_environment("my_puzzle", environments_path=[path])


def test_an_argument_that_is_not_given_is_an_error_with_the_fix(write):
    path = write("needy", PLAIN.format(name="Needy").replace("num_samples=-1, **kwargs", "path, num_samples=-1"))
    with pytest.raises(UserError, match=r"load_dataset of 'needy': missing a required argument: 'path'\. .* in its kw"):
        len(get_environment("needy", environments_path=[path]))
    assert len(get_environment("needy", environments_path=[path], path="x")) == 2
    constructor = "def __init__(self, shape, **kwargs):\n            super().__init__(**kwargs)\n\n        def load"
    write("needy_too", PLAIN.format(name="Needy").replace("def load", constructor))
    with pytest.raises(UserError, match=r"The constructor of the environment 'needy_too': missing a .* 'shape'\. Set"):
        get_environment("needy_too", environments_path=[path])


def test_a_class_is_found_by_its_dotted_path(write, monkeypatch, tmp_path):
    (tmp_path / "my_package_for_tests").mkdir()
    (tmp_path / "my_package_for_tests" / "puzzles.py").write_text(textwrap.dedent(PLAIN.format(name="Dotted")))
    monkeypatch.syspath_prepend(tmp_path)
    assert len(get_environment("my_package_for_tests.puzzles:Dotted")) == 2
    assert len(get_eval("my_package_for_tests.puzzles:Dotted")) == 2
    with pytest.raises(
        UserError, match=r"'Doted' in my_package_for_tests\.puzzles does not exist\. Did you mean 'Dotted'"
    ):
        get_environment("my_package_for_tests.puzzles:Doted")
    with pytest.raises(UserError, match=r"'Sample' in my_package_for_tests\.puzzles is not a subclass"):
        get_environment("my_package_for_tests.puzzles:Sample")
    with pytest.raises(UserError, match=r"there is no module 'my_package_for_tests\.lost'"):
        ENVIRONMENTS.check("my_package_for_tests.lost:Dotted")


def test_installed_entry_points_are_environments(monkeypatch):
    point = metadata.EntryPoint(
        "installed", "telescope.environments.countdown.environment:CountdownEnvironment", "telescope.environments"
    )
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [point] if group == point.group else [])
    assert "installed" in list_environments()
    assert get_environment("installed", dataset="generated", num_samples=2).name == "installed"


def test_arguments_reach_the_constructor_and_the_dataset_as_each_declares_them(write):
    path = write(
        "styles",
        """
        from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment

        class Base(SingleTurnEnvironment):
            def __init__(self, depth=1, **kwargs):
                self.style = kwargs.pop("style", "plain")
                super().__init__(**kwargs)
                self.depth = depth

            def compute_reward(self, completion, sample, eos_token=""):
                return RewardResult(0.0)

        class Styles(Base):
            def __init__(self, width=1, **kwargs):
                super().__init__(**kwargs)
                self.width = width

            def load_dataset(self, num_samples=-1, dataset_name="d", **kwargs):
                return [Sample(dataset_name, kwargs.get("difficulty", "easy"))]
        """,
    )
    environment = get_environment(
        "styles", environments_path=[path], width=2, depth=3, style="s", dataset_name="n", difficulty="hard",
        system_prompt="sys",
    )  # fmt: skip
    assert (environment.width, environment.depth, environment.style) == (2, 3, "s")
    assert environment.system_prompt == "sys"
    assert (environment.get_sample(0).prompt, environment.get_sample(0).answer) == ("n", "hard")
    with pytest.raises(UserError, match="Did you mean 'dataset_name'") as raised:
        get_environment("styles", environments_path=[path], dataset_nam="n")
    known = {"width", "depth", "style", "num_samples", "dataset_name", "difficulty", "system_prompt"}
    assert known <= set(str(raised.value).split("It takes: ")[1].rstrip(".").split(", "))


def test_a_constructor_that_ignores_its_base_works(write):
    constructor = "\n        def __init__(self, size=3):\n            self.size = size\n"
    path = write("stubborn", PLAIN.format(name="Stubborn") + constructor)
    environment = get_environment("stubborn", environments_path=[path], size=4, num_samples=1)
    assert (environment.size, len(environment), environment.build_messages("q")[0]["content"]) == (4, 1, "q")


def test_prompts_and_turns_may_be_attributes_of_the_class(write):
    prompts = "instruction_prompt = system_prompt = 'Be brief.'"
    path = write("asks", PLAIN.format(name="Asks").replace("def load", f"{prompts}\n\n        def load", 1))
    environment = get_environment("asks", environments_path=[path])
    assert environment.build_messages("a") == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Be brief.\n\na"},
    ]  # fmt: skip
    given = get_environment("asks", environments_path=[path], system_prompt="Think.", instruction_prompt="")
    assert [message["content"] for message in given.build_messages("a")] == ["Think.", "a"]
    with_tools = get_environment("asks", environments_path=[path], tools=["shell"])
    assert with_tools.system_prompt.startswith("Be brief.\n\nYou may call") and with_tools.max_turns == 10
    default = get_environment("countdown").system_prompt
    assert get_environment("countdown", tools=["shell"]).system_prompt.startswith(f"{default}\n\nYou may call")
    write("plays", PLAYS)
    assert get_environment("plays", environments_path=[path]).max_turns == 3
    assert get_environment("plays", environments_path=[path], max_turns=10).max_turns == 10


def test_every_environment_is_an_eval():
    assert "countdown" in list_evals()
    assert check_eval("countdown").name == "countdown"
    evaluation = get_eval("countdown", dataset="generated", portion="heldout", num_samples=3, prompt_style="short")
    assert len(evaluation) == 3
    assert evaluation.metrics_ranges["correct"] == {"min": 0.0, "max": 1.0}
    result = evaluation.compute_eval_metrics("<answer>1</answer>", evaluation.get_sample(0))
    assert result.metrics == {"reward": 1.0, "correct": 0.0, "format": 1.0}
    with pytest.raises(UserError, match="Did you mean 'portion'"):
        get_eval("countdown", portoin="heldout")
    with pytest.raises(UserError, match="Did you mean 'countdown'"):
        get_eval("countdwn")


def test_an_eval_uses_its_environment_for_what_it_does_not_define(write):
    path = write(
        "bench",
        """
        from telescope.environments.base import EvalMetricsResult, Sample
        from telescope.evals import Eval

        class Bench(Eval):
            environment_name = "countdown"
            environment_kwargs = {"dataset": "generated", "prompt_style": "short"}
            system_prompt = "of the eval"

            def load_dataset(self, num_samples=-1, dataset_split="test"):
                return [Sample(dataset_split, "1")]
        """,
        file="eval.py",
    )
    evaluation = get_eval("bench", environments_path=[path], dataset_split="dev", instruction_prompt="I")
    assert "bench" in list_evals([path])
    messages = evaluation.build_messages(evaluation.get_sample(0).prompt)
    assert [m["content"] for m in messages] == ["of the eval", "I\n\ndev"]
    sample = Sample("", "3", {"numbers": [1, 2], "target": 3})
    assert evaluation.compute_eval_metrics("<answer>1+2</answer>", sample).metrics["correct"] == 1.0


def test_an_eval_without_environment_and_dataset_is_an_error_with_the_fix(write):
    path = write("empty", "from telescope.evals import Eval\nclass Empty(Eval): ...", file="eval.py")
    with pytest.raises(UserError, match="set environment_name"):
        len(get_eval("empty", environments_path=[path]))


@pytest.mark.parametrize(("given", "problem"), [
    ({"num_samples": "ten"}, 'num_samples is "ten", but it must be a whole number'),
    ({"num_samples": 2.5}, "num_samples is 2.5, but it must be a whole number"),
    ({"num_samples": [1]}, r"num_samples is \[1\], but it must be a whole number"),
    ({"correct_reward": "much"}, 'correct_reward is "much", but it must be a number'),
    ({"operations": 3}, "operations is 3, but it must be text; put it in quotes"),
])  # fmt: skip
def test_a_value_of_a_wrong_type_names_the_environment_and_the_argument(given: dict, problem: str) -> None:
    for make, kind in ((get_environment, "environment"), (get_eval, "environment")):
        with pytest.raises(UserError, match=f"^The {kind} 'countdown': {problem}. Correct it in its kwargs.$"):
            make("countdown", **given)
    get_environment("countdown", dataset="generated", num_samples=3, correct_reward=1, instruction_prompt=None)
