"""The fields of `telescope eval`: its own, those of training that concern it, and those of a run."""

from pathlib import Path

import pytest
import yaml

from telescope.config import EvalEntry, load_config
from telescope.config.eval_config import (
    SHARED_FIELDS,
    build_eval_config,
    known_evals,
    load_eval_request,
    measurement_digest,
)
from telescope.errors import ConfigError

ROOT = Path(__file__).parents[3]
PUBLISHED = """
wandb_run_path: null
evals:
  - {name: math500, num_samples: 50, kwargs: {dataset_split: test}, temperature: 0.6, top_p: 0.95, max_tokens: 1024,
     pass_k: {at_k: {metrics: [correct], k: [1, 8]}}}
checkpoint_dir: runs/first/checkpoints
checkpoints: [{path: models/a, step: 50}, {path: models/b}]
hf_weights: Qwen/Qwen2.5-3B
max_concurrent_samples_per_server: 256
inference_num_workers: 2
inference_tensor_parallel_size: 2
gpu_memory_utilization: 0.8
max_model_len: 8192
vllm_scheduling_policy: fcfs
enable_thinking: true
chat_template: null
temperature: 1.0
top_p: 0.9
max_tokens: 4096
enable_prompt_prefetch: true
inference_host: 127.0.0.1
inference_base_port: 8200
ray_address: auto
ray_inference_cpus_per_worker: 2
ray_inference_placement_strategy: SPREAD
"""


def test_every_field_of_files_in_use_is_taken(tmp_path):
    (tmp_path / "eval.yaml").write_text(PUBLISHED)
    request = load_eval_request(tmp_path / "eval.yaml")
    assert [entry.step for entry in request.command.checkpoints] == [50, None]
    config = build_eval_config(request, None, request.command.evals, Path("/models/a"))
    for name, value in yaml.safe_load(PUBLISHED).items():
        if name in SHARED_FIELDS:
            assert config.values[name] == value, name
    assert config.lanes_per_server == 256
    assert config.seq_len == 8192, "no shorter context than was asked for"
    assert config.num_eval_servers == 0
    assert [note.split()[0] for note in request.notes] == ["enable_prompt_prefetch"]


def test_the_file_that_ships_is_valid():
    request = load_eval_request(ROOT / "configs" / "evals" / "eval.yaml")
    build_eval_config(request, None, request.command.evals, Path("/models/a"))


def test_flags_win_over_the_file(tmp_path):
    (tmp_path / "eval.yaml").write_text(PUBLISHED)
    request = load_eval_request(tmp_path / "eval.yaml", ["--max_tokens", "7"], {"checkpoint_dir": "elsewhere"})
    assert request.fields["max_tokens"] == 7
    assert request.command.checkpoint_dir == "elsewhere"


@pytest.mark.parametrize(("text", "message"), [
    ("learning_rate: 1", r"learning_rate \(.*line 1\) is a field of training, which evals do not use\. Remove it"),
    ("model: a", "Name models as arguments"),
    ("checkpoint_dirs: a", "checkpoint_dir"),
    ("evals: [{name: math500, num_samples: 0}]", "0 samples evaluate nothing"),
    ("checkpoints: [{step: 5}]", "path"),
    ("checkpoints: [models/a]", "checkpoints.0. is .models/a. .*a mapping, such as {path: runs/first/"),
    ("max_concurrent_samples_per_server: 0", "max_concurrent_samples_per_server"),
])  # fmt: skip
def test_what_evals_do_not_have_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "eval.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_eval_request(tmp_path / "eval.yaml")


def test_checkpoints_of_a_run_are_measured_with_the_run_s_prompts_and_sampling():
    run = load_config(
        None,
        ["--environments", "[{name: countdown, kwargs: {max_number: 7}}]", "--temperature", "0.7", "--seq_len", "9000",
         "--max_tokens", "99", "--group_size", "4", "--use_wandb", "true", "--enable_thinking", "true"],
        {},
    ).config  # fmt: skip
    request = load_eval_request(None, ["--max_tokens", "50"])
    config = build_eval_config(request, run.values, [EvalEntry(name="countdown")], Path("/models/a"))
    assert (config.temperature, config.seq_len, config.enable_thinking) == (0.7, 9000, True)
    assert config.max_tokens == 50, "what is asked for wins"
    assert config.environments[0].kwargs == {"max_number": 7}, "an eval of this name has these settings"
    assert "inference_host" not in config.user_set, "a default stays one, and servers on loopback"


def test_sampling_that_is_asked_for_wins_over_that_of_the_run_s_evals():
    request = load_eval_request(None, ["--temperature", "0", "--top_p", "0.9"])
    _, evals = known_evals(request, [EvalEntry(name="math500", temperature=1.0, max_tokens=7)])
    config = build_eval_config(request, None, evals, Path("/models/a"))
    assert (config.evals[0].temperature, config.evals[0].max_tokens) == (0.0, 7), "greedy"
    assert (config.top_p, config.evals[0].top_p) == (0.9, None)


def test_sampling_of_an_eval_in_the_file_yields_to_flags_alone(tmp_path):
    file = tmp_path / "eval.yaml"
    file.write_text("evals: [{name: math500, temperature: 0.6}]\ntemperature: 1.0\n")
    for flags, own in ([], 0.6), (["--temperature", "0.2"], None):
        given, of_run = known_evals(load_eval_request(file, flags), [EvalEntry(name="aime_2024", temperature=0.9)])
        assert (given[0].temperature, of_run[0].temperature) == (own, None)


def test_a_model_whose_config_is_broken_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text("{bad")
    with pytest.raises(ConfigError, match=r"config\.json of .* cannot be read: .*Download or save it again"):
        build_eval_config(load_eval_request(None), None, [], tmp_path)


@pytest.mark.parametrize("value", ["4k", "null"])
def test_a_context_that_is_no_number_is_refused_by_name(value):
    request = load_eval_request(None, ["--max_model_len", value])
    with pytest.raises(ConfigError, match=r"max_model_len is .*, but it must be a whole number"):
        build_eval_config(request, None, [], Path("/models/a"))


def test_rollout_workers_of_an_eval_are_set_as_those_of_a_run():
    flags = ["--rollout_num_workers", "3", "--rollout_cpus_per_worker", "2", "--environment_error_budget", "0.5"]
    config = build_eval_config(load_eval_request(None, flags), None, [EvalEntry(name="countdown")], Path("/models/a"))
    assert (config.rollout_num_workers, config.rollout_cpus_per_worker) == (3, 2)
    assert config.environment_error_budget == 0.5


def test_only_what_changes_results_is_another_measurement():
    request = load_eval_request(None, [])
    evals = [EvalEntry(name="math500")]

    def digest(*flags: str, **changes: object) -> str:
        config = build_eval_config(load_eval_request(None, list(flags)), None, evals, Path("/models/a"))
        return measurement_digest(config, [EvalEntry(**{"name": "math500", **changes})])

    same = measurement_digest(build_eval_config(request, None, evals, Path("/models/b")), evals)
    assert digest() == digest("--inference_base_port", "9000") == digest(eval_every=3) == same
    assert len({digest(), digest("--temperature", "0.5"), digest("--seed", "3"), digest(num_samples=7)}) == 4
