"""The environments of a process: what is loaded when, and errors that name the environment."""

import pytest

from telescope.environments.base import EvalMetricsResult, RewardResult, Sample, SingleTurnEnvironment
from telescope.environments.types import EnvironmentSpec
from telescope.errors import UserError
from telescope.evals import Eval
from telescope.rollout.loaded_environment import LoadedEnvironment


class Broken(SingleTurnEnvironment):
    def load_dataset(self, num_samples=-1):
        raise self.error

    def compute_reward(self, completion, sample, eos_token=""):
        return RewardResult(1.0)


def make(name, *, environments_path, error):
    return Broken(error=error)


@pytest.mark.parametrize(("error", "words"), [
    (ValueError("no such file"), "Loading the dataset of the environment 'broken' failed: ValueError: no such file"),
    (ConnectionError("no hub"), "ConnectionError: no hub.* Connect this machine, or download the dataset"),
])  # fmt: skip
def test_the_dataset_is_loaded_in_its_own_stage_and_its_error_names_the_environment(error, words):
    stages = []
    spec = EnvironmentSpec("broken", {"error": error}, factory=f"{__name__}:make")
    loaded = LoadedEnvironment(spec, None, [], on_stage=lambda stage, description: stages.append(stage))
    assert stages == ["making"]
    with pytest.raises(UserError, match=words):
        loaded.describe()
    assert stages == ["making", "dataset"]


class Alone(Eval):
    def load_dataset(self, num_samples=-1):
        return [Sample("?")]

    def compute_eval_metrics(self, completion, sample, eos_token=""):
        return EvalMetricsResult({"length": len(completion)})


def make_eval(name, *, environments_path):
    return Alone()


async def test_an_eval_without_an_environment_has_no_resources():
    loaded = LoadedEnvironment(EnvironmentSpec("alone", {}, factory=f"{__name__}:make_eval"), None, [])
    assert not loaded.describe().shares_resources, "it may run in every process of a host"
    await loaded.prepare_resources()
    await loaded.close()


@pytest.mark.parametrize(("field", "value", "problem"), [
    ("metrics_ranges", {"correct": (0, 1)}, r"metrics_ranges.correct is \[0, 1\], but it must be a mapping"),
    ("metrics_ranges", {"correct": {"min": "0"}}, 'metrics_ranges.correct.min is "0", but it must be a number'),
    ("tags_options", {"level": "easy"}, 'tags_options.level is "easy", but it must be a list'),
    ("reward_min", "0", 'reward_min is "0", but it must be a number'),
    ("reward_max", float("inf"), "reward_max is inf, but it must be a finite number"),
])  # fmt: skip
def test_a_malformed_attribute_for_charts_names_the_environment_and_the_value(field, value, problem):
    spec = EnvironmentSpec("alone", {}, factory=f"{__name__}:make_eval")
    loaded = LoadedEnvironment(spec, None, [])
    loaded.environment.metrics_ranges = {"correct": {"min": 0, "max": 1.0, "invert": True}}
    loaded.describe()
    setattr(loaded.environment, field, value)
    with pytest.raises(UserError, match=f"The environment 'alone': {problem}.* Correct it in its class"):
        loaded.describe()
