"""Configuration files that people have keep working: their values, names and keyword arguments."""

import re

import pytest
import yaml
from tests.unit.config.test_rules import ADJUSTED

from telescope.config import load_config
from telescope.config.generate import default_yaml
from telescope.config.remarks import remarks
from telescope.environments.arguments import known_arguments
from telescope.environments.base import Environment
from telescope.environments.registry import ENVIRONMENTS
from telescope.environments.types import EnvironmentInfo
from telescope.errors import ConfigError
from telescope.evals.base import EVALS, Eval, get_eval
from telescope.evals.entries import check_eval_items, environment_keys
from telescope.orchestrator.preflight import CHECKS, find_problems

COUNTDOWN = [{"name": "countdown"}]
THAT_EXIST = [check for check in CHECKS if check.scope == "environments"]
DATASET = ("dataset_name", "dataset_split")


def resolved(tmp_path, values, *flags):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return load_config(file, list(flags), {})


@pytest.mark.parametrize("changes", [values for *_, values in ADJUSTED])
def test_a_copy_of_the_default_file_resolves_as_the_changes_alone(tmp_path, changes):
    changes = {"environments": COUNTDOWN, **changes}
    alone = resolved(tmp_path, changes)
    copied = resolved(tmp_path, {**yaml.safe_load(default_yaml()), **changes})
    assert copied.config == alone.config
    assert copied.notes == alone.notes


def test_a_default_of_another_type_is_no_default(tmp_path):
    with pytest.raises(ConfigError, match="true is a boolean, which this field does not take"):
        resolved(tmp_path, {"environments": COUNTDOWN, "inference_tensor_parallel_size": True})


def test_a_default_that_is_typed_on_the_command_line_is_chosen(tmp_path):
    lanes = {"environments": COUNTDOWN, "enable_individual_sample_lanes": False}
    with pytest.raises(ConfigError, match="free_lane_after_generation is true, but it requires"):
        resolved(tmp_path, lanes, "--free_lane_after_generation")


def test_a_default_in_the_file_wins_over_the_environment(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("environments: [{name: countdown}]\nwandb_project: telescope\n")
    assert load_config(file, [], {"WANDB_PROJECT": "other"}).config.wandb_project == "telescope"


@pytest.mark.parametrize("algorithm", ["cispo", "gspo", "sapo"])
def test_clip_ratio_c_is_taken_by_losses_that_bound_the_ratio_themselves(tmp_path, algorithm):
    loaded = resolved(tmp_path, {"environments": COUNTDOWN, "algorithm": algorithm, "clip_ratio_c": 3.0})
    assert f"clip_ratio_c has no effect, because {algorithm} bounds the ratio itself. Leave it null." in loaded.notes


def test_a_grad_clip_of_0_and_an_answer_as_long_as_the_context_are_taken(tmp_path):
    loaded = resolved(tmp_path, {"environments": COUNTDOWN, "grad_clip": 0, "max_tokens": 2048, "max_model_len": 2048})
    assert (loaded.config.grad_clip, loaded.config.max_tokens) == (0.0, 2048)
    assert any("each answer is shorter by its prompt's length" in note for note in loaded.notes)


@pytest.mark.parametrize(("name", "kwargs"), [
    ("dapo_math", (*DATASET, "dataset_subset")),
    ("deepscaler", (*DATASET, "dataset_subset")),
    ("math500", (*DATASET, "instruction_prompt_post")),
    ("aime_2024", (*DATASET, "instruction_prompt_post")),
    ("aime_2025", (*DATASET, "instruction_prompt_post")),
    ("gpqa_diamond", (*DATASET, "dataset_subset", "shuffle_seed", "instruction_prompt_pre")),
])  # fmt: skip
def test_environments_and_evals_of_files_in_use_resolve_with_their_arguments(tmp_path, name, kwargs):
    is_eval = EVALS.has(name, ())
    entry = {"name": name, "kwargs": dict.fromkeys(kwargs)}
    values = {"environments": COUNTDOWN, "evals": [entry]} if is_eval else {"environments": [entry]}
    assert find_problems(THAT_EXIST, resolved(tmp_path, values).config) == []
    if is_eval:
        evaluation = get_eval(name, **entry["kwargs"])
        known = known_arguments(type(evaluation), Eval) | known_arguments(type(evaluation.env), Environment)
    else:
        known = known_arguments(ENVIRONMENTS.load_class(name), Environment)
    assert set(kwargs) <= known


def test_an_environment_that_does_not_ship_is_refused_by_name(tmp_path):
    (problem,) = find_problems(THAT_EXIST, resolved(tmp_path, {"environments": [{"name": "deepdive"}]}).config)
    assert "'deepdive'" in problem


@pytest.mark.parametrize(("metric", "remark", "error"), [
    ("correct", None, None),
    ("reward", None, None),
    ("corect", None, "names the metric 'corect', which it does not declare. Did you mean 'correct'?"),
    ("style", "names the metric 'style', which it does not declare (declared are correct, reward)", None),
])  # fmt: skip
def test_metrics_of_pass_k_are_those_that_the_environment_declares(tmp_path, metric, remark, error):
    evals = [{"name": "countdown", "pass_k": {"at_k": {"metrics": [metric], "k": [1, 4]}}}]
    config = resolved(tmp_path, {"environments": COUNTDOWN, "evals": evals}).config
    keys = environment_keys(config)
    infos = {key: EnvironmentInfo("countdown", 10, metrics_ranges={"correct": {}}) for key in keys.evals}
    if error is not None:
        with pytest.raises(ConfigError, match=re.escape(error)):
            check_eval_items(config, keys, infos)
        return
    found = check_eval_items(config, keys, infos)
    assert (remark in " ".join(found)) if remark else found == []


@pytest.mark.parametrize(("values", "words"), [
    ({"max_async_rollout": 4}, "which discards none. Set max_off_policy_steps to about 12, or to -1"),
    ({"max_off_policy_steps": 20}, "generation runs no further ahead"),
    ({"max_async_rollout": 4, "max_off_policy_steps": 16}, None),
    ({"max_async_rollout": 4, "max_off_policy_steps": -1}, None),
    ({"max_async_rollout": 3}, None),
    ({"max_async_rollout": 1}, None),
    ({}, None),
])  # fmt: skip
def test_raising_one_bound_of_asynchrony_alone_is_a_remark(tmp_path, values, words):
    found = " ".join(remarks(resolved(tmp_path, {"environments": COUNTDOWN, **values}).config))
    assert (words in found) if words else "further ahead" not in found and "log-normal" not in found
