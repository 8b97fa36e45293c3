"""Loading a configuration from defaults, environment variables, YAML and flags, and its error messages."""

import re
import shlex
from pathlib import Path

import pytest

from telescope.config import load_config
from telescope.config.algorithms import ALGORITHM_FACTS
from telescope.config.loader import parse_overrides
from telescope.errors import ConfigError

RUN_YAML = """\
model: "Qwen/Qwen2.5-0.5B"
environments:
  - name: countdown
    weight: 2
learning_rate: 5e-7
group_size: 4
"""


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN_YAML)
    return path


NO_WANDB = ("--environments", "[{name: a}]", "--use_wandb", "false")
"""A run without uploads, which have no effect yet and are reported."""


def load(path: Path | None, *flags: str, **environ: str):
    return load_config(path, list(flags), environ)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    return path


def error_of(path: Path | None, *flags: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(path, *flags)
    return str(raised.value)


def test_the_file_overrides_defaults_and_flags_override_the_file(run_yaml):
    config = load(run_yaml, "--group_size", "16").config
    assert config.learning_rate == 5e-7
    assert config.group_size == 16
    assert config.number_of_steps == 300
    assert config.user_set == {"model", "environments", "learning_rate", "group_size"}


SPELLINGS = "--learning_rate 5e-7, --learning-rate 5e-7, --learning_rate=5e-7, --learning-rate=0.0000005"


@pytest.mark.parametrize("flags", [*SPELLINGS.split(", "), "--learning_rate 5.0e-07"])
def test_all_spellings_of_a_flag_mean_the_same(flags):
    assert parse_overrides(flags.split()) == {"learning_rate": 5e-7}


def test_flag_values_are_yaml_scalars_lists_and_mappings():
    assert parse_overrides(
        [
            "--top_p", "null", "--use_wandb", "false", "--debug", "--max_off_policy_steps", "-1",
            "--wandb_tags", "[a, b]", "--environments", "[{name: countdown, kwargs: {num_samples: 10, lr: 1e-3}}]",
            "--ray_runtime_env={env_vars: {A: 'b'}}", "--lr_scheduler", "none",
        ]
    ) == {
        "top_p": None, "use_wandb": False, "debug": True, "max_off_policy_steps": -1, "wandb_tags": ["a", "b"],
        "environments": [{"name": "countdown", "kwargs": {"num_samples": 10, "lr": 1e-3}}],
        "ray_runtime_env": {"env_vars": {"A": "b"}}, "lr_scheduler": "none",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "typed"),
    [("wandb_run_name", "2026"), ("chat_template", "{% for m in messages %}{{ m }}{% endfor %}"), ("model", "1e3")],
)
def test_fields_that_take_only_text_get_it_as_typed(name, typed):
    assert parse_overrides([f"--{name}", typed]) == {name: typed}
    assert parse_overrides(["--chat_template", "null"]) == {"chat_template": None}


def test_environment_variables_fill_in_what_nothing_else_sets(run_yaml):
    variables = {
        "TELESCOPE_RUN_DIR": "/tmp/x", "TELESCOPE_CHECKPOINT_DIR": "/tmp/c", "WANDB_PROJECT": "p",
        "WANDB_RUN_NAME": "n", "WANDB_TAGS": "a, b,",
    }  # fmt: skip
    loaded = load(run_yaml, "--wandb_project", "mine", **variables)
    config = loaded.config
    assert (config.run_dir, config.checkpoint_dir, config.wandb_run_name) == ("/tmp/x", "/tmp/c", "n")
    assert config.wandb_tags == ["a", "b"]
    assert config.wandb_project == "mine"
    assert loaded.sources["run_dir"] == "environment variable TELESCOPE_RUN_DIR"
    assert loaded.sources["wandb_project"] == "command line"
    assert loaded.sources["model"] == f"{run_yaml}, line 1"


@pytest.mark.parametrize(("text", "words"), [
    ("environments: [{name: a}]\nlearning_rte: 1.0\n", ["'learning_rte'", "line 2", "Did you mean 'learning_rate'?"]),
    ("trainer:\n  learning_rate: 1.0\n  grad_clip: 1.0\n", ["write learning_rate, grad_clip without 'trainer'"]),
    ("model: [1", ["not valid YAML"]),
    ("model: x\n\tseed: 1\n", ["not valid YAML"]),
    ("seed: 1\nmodel: x\nseed: 2\n", ["'seed' is set twice, first in line 1 (line 3"]),
    ("- 1\n", ["must hold `field: value` lines"]),
    ("model: " + "[" * 5000 + "]" * 5000, ["nested too deeply"]),
    ("seed: 1\n", ["at least one environment"]),
    ("yes: 1\n", ["Unknown configuration field 'True' ("]),
    ("<<: {sede: 1}\n", ["'sede'", "Did you mean 'seed'?"]),
], ids=lambda value: value[:24] if isinstance(value, str) else "")  # fmt: skip
def test_a_file_that_is_not_a_configuration_is_refused_with_line_and_fix(tmp_path, text, words):
    message = error_of(write(tmp_path, text))
    assert all(word in message for word in words)


@pytest.mark.parametrize(("typed", "meant"), [
    ("learning-rat", "learning_rate"), ("lr", "learning_rate"), ("batch_size", "prompts_batch_size_for_trainer"),
    ("number_of_step", "number_of_steps"), ("warmup", "warmup_steps"), ("max_model_length", "max_model_len"),
    ("wandb_name", "wandb_run_name"), ("Temperature", "temperature"), ("confg", "config"), ("dryrun", "dry-run"),
])  # fmt: skip
def test_an_unknown_flag_suggests_the_nearest_name(typed, meant):
    assert f"Did you mean '{meant}'?" in error_of(None, f"--{typed}", "1")


@pytest.mark.parametrize("typed", ["dry-run", "dry_run", "config"])
def test_a_flag_that_only_train_has_is_not_suggested_for_itself(typed):
    assert f"Did you mean '{typed.replace('_', '-')}'" not in error_of(None, f"--{typed}")


def test_unknown_names_without_resemblance_get_no_suggestion():
    message = error_of(None, "--zzzz", "1")
    assert "Did you mean" not in message
    assert "telescope config explain" in message


def test_all_wrong_fields_are_reported_at_once():
    assert len(error_of(None, *NO_WANDB[:2], "--group_size", "0", "--learning_rate", "-1").splitlines()) == 2


@pytest.mark.parametrize(("field", "value", "words"), [
    ("learning_rate", "0", "above 0"), ("learning_rate", "fast", "must be a number"),
    ("group_size", "0", "at least 1"), ("group_size", "1.5", "whole number"), ("group_size", "true", "boolean"),
    ("gpu_memory_utilization", "1.1", "at most 1"), ("min_lr_ratio", "-0.1", "at least 0"),
    ("clip_low", "1.5", "at most 1"), ("otlp_receiver_port", "70000", "at most 65535"),
    ("max_async_rollout", "-1", "at least 0"), ("max_off_policy_steps", "-2", "at least -1"),
    ("top_p", "0", "above 0"), ("megatron_optimizer_offload_fraction", "2", "at most 1"),
    ("algorithm", "gpro", "Did you mean 'grpo'?"), ("model_dtype", "bf16", "one of"),
    ("train_backend", "deepspeed", "class path"), ("use_wandb", "maybe", "true or false"),
    ("fsdp_reshard_after_forward", "maybe", 'true or false, or "auto"'),
    ("wandb_tags", "a", "must be a list"), ("wandb_tags", "[a, 1]", "but it must be text; put it in quotes"),
    ("checkpoint_every", "true", "number of steps"),
    ("resume_from_checkpoint", "0", "number of a checkpoint"), ("ray_runtime_env", "[1]", "must be a mapping"),
    ("ray_trainer_cpus_per_worker", "1e-9", "at least 0.0001"),
    ("ray_inference_cpus_per_worker", "0.00009", "at least 0.0001"),
    ("ray_inference_cpus_per_worker", "0", "at least 0.0001"),
    ("ray_address", "ray://10.0.0.1:10001", "ray:// addresses are those of clients outside of the cluster"),
    ("ray_address", "ray://10.0.0.1:10001", 'Start the run on a node of the cluster, with "auto" or'),
    ("ray_trainer_placement_strategy", "pack", "Did you mean 'PACK'?"),
    ("megatron_exp_avg_dtype", "int8", "one of"), ("learning_rate", ".nan", "finite"),
    ("environments", "countdown", "must be a list, such as [{name: countdown}]"), ("device", "gpu", "device cuda"),
    ("record_tokens", "70000", 'at most 65536, or one of "none", "all"'),
    ("resume_from_checkpoint", "latest", "true or false, or a whole number"),
    ("environments", "[countdown]", "a mapping, such as {name: countdown}"),
])  # fmt: skip
def test_a_wrong_value_is_named_with_what_would_be_right(field, value, words):
    flags = ["--environments", "[{name: a}]"] if field != "environments" else []
    message = error_of(None, *flags, f"--{field}", value)
    assert message.startswith(field)
    assert words in message
    assert "command line" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(("field", "entry", "words"), [
    ("environments", "{weight: 1}", "environments[0].name is missing"),
    ("environments", "{name: a, weight: 0}", "environments[0].weight is 0"),
    ("environments", "{name: a, wieght: 1}", "Did you mean 'weight'?"),
    ("environments", "{name: a, level: 1}", "An argument of it goes into kwargs: {level: ...}."),
    ("evals", "{name: a, path: mine}", "kwargs: {path: ...}. Folders that hold environments and"),
    ("environments", "{name: a, reward_min: 2, reward_max: 1}", "reward_min (2.0) must be below reward_max (1.0)"),
    ("environments", "{name: a, kwargs: [1]}", "must be a mapping"),
    ("environments", "{name: a, kwargs: {1: 2}}", "].kwargs has the key 1 (command line), which must be text"),
    ("environments", "{name: ''}", "must not be empty"),
    ("environments", "{name: a, kwargs: {date: !!timestamp 2026-01-01}}", "put it in quotes"),
    ("evals", "{name: a, num_samples: 0}", "-1 for the full dataset"),
    ("evals", "{name: a, eval_every: 0}", "at least 1"),
    ("evals", "{name: a, separate_eval_samples: true}", "set num_samples"),
    ("evals", "{name: a, pass_k: {at: {metrics: [c], k: [1]}}}", "at_k"),
    ("evals", "{name: a, pass_k: {at_k: {metrics: [c]}}}", "exactly `metrics` and `k`"),
    ("evals", "{name: a, pass_k: {at_k: {metrics: [c], k: [0]}}}", "from 1 to 4096"),
    ("evals", "{name: a, pass_k: {pow_k: {metrics: [c], k: [8, 1000000]}}}", "every item is sampled as often as the l"),
    ("evals", "{name: a, pass_k: {pow_k: {metrics: [], k: [1]}}}", "metric names"),
    ("evals", "{name: a, temperature: -1}", "at least 0"),
])  # fmt: skip
def test_a_wrong_entry_is_named(field, entry, words):
    assert words in error_of(None, *NO_WANDB[: 2 * (field == "evals")], f"--{field}", f"[{entry}]")


@pytest.mark.parametrize(("flags", "words"), [
    (["--learning_rate"], "needs a value, as in --learning_rate 1e-06"),
    (["learning_rate=1"], "Unexpected argument 'learning_rate=1'"),
    (["mine.yaml"], "a file of fields as --config mine.yaml"),
    (["--wandb_tags", "[a"], "is not valid YAML"),
    (["--wandb_tags", "[" * 3000], "[[[... is nested too deeply"),
    (["--stop", "['a\nb"], "end of stream (line 2, column 2), while scanning a quoted scalar (line 1, column 2)"),
    (["--seed", "9" * 5000], "999... has a value that cannot be read: "),
    (["--seed", "!!int 1:30"], 'has a value that cannot be read: "invalid literal'),
    (["--environments", "[{name: a, kwargs: {b: !!bool maybe}}]"], "has a value that cannot be read"),
    (["--seed", "!!timestamp soon"], "has a value that cannot be read"),
])  # fmt: skip
def test_flags_that_cannot_be_read(flags, words):
    assert words in error_of(None, *flags)


def test_a_file_that_does_not_exist_lists_its_neighbors(run_yaml):
    message = error_of(run_yaml.with_name("rum.yaml"))
    assert "does not exist" in message and "run.yaml" in message
    assert "is a directory" in error_of(run_yaml.parent)


def test_an_empty_file_lacks_an_environment(tmp_path):
    path = write(tmp_path, "# nothing\n")
    assert f"--config {path} is empty: it sets no field" in error_of(path)
    assert load(path, "--environments", "[{name: a}]").config.environments


@pytest.mark.parametrize(("text", "value"), [("010", 10), ("0o17", 15), ("0x1F", 31), ("1_000", 1000), ("1e3", 1000)])
def test_numbers_follow_yaml_1_2(tmp_path, text, value):
    assert load(write(tmp_path, f"environments: [{{name: a}}]\nseed: {text}\n")).config.seed == value


@pytest.mark.parametrize("text", ["1:30", "2026-01-01", "0b11"])
def test_numbers_and_dates_of_yaml_1_1_alone_are_text(tmp_path, text):
    environments = "environments: [{name: a}]\n"
    assert load(write(tmp_path, f"{environments}wandb_run_name: {text}\n")).config.wandb_run_name == text
    message = error_of(write(tmp_path, f"{environments}seed: {text}\n"))
    assert f'seed is "{text}" (' in message
    assert message.endswith("but it must be a whole number")


PASS_K = "pass_k: {at_k: {metrics: [correct], k: [8]}}"
GREEDY = f"[{{name: a, temperature: 0, {PASS_K}}}, {{name: b, {PASS_K}}}, {{name: c, temperature: 0}}]"
QUANTIZED = "--inference_quantization fp8_per_block --inference_dtype bfloat16"
ALPHA = "--lora_alpha 64 --lora_dropout 0.1"
BELOW = "^max_off_policy_steps is 1, below max_async_rollout, which is 2:"
TO_RAISE = "Set max_off_policy_steps to at least 2, or max_async_rollout to 1."


@pytest.mark.parametrize(("flags", "words"), [
    (
        f"--evals '{GREEDY}' --eval_num_servers 0",
        ["^evals: 'a' has pass_k and temperature 0: all samples of an item are the same"],
    ),
    (QUANTIZED, ["Set use_tis to true"]),
    (f"{QUANTIZED} --use_tis true", []),
    (ALPHA, ["^lora_alpha and lora_dropout have no effect"]),
    (f"{ALPHA} --lora_rank 8", []),
    ("--max_off_policy_steps 1", [BELOW, TO_RAISE]),
    *[(f"--max_off_policy_steps {n} --max_async_rollout {ahead}", []) for n, ahead in ((2, 2), (0, 0), (-1, 2))],
    ("--algorithm gspo", ["clip_low 0.4 and clip_high 0.5 will not bind", "clip_low 3e-4 and clip_high 4e-4"]),
    ("--algorithm gspo --clip_low 3e-4", ["so clip_high 0.5 will not bind"]),
    ("--algorithm gspo --clip_low 3e-4 --clip_high 4e-4", []),
    ("--model_dtype float16", ["^model_dtype is float16, .* Set model_dtype to bfloat16 or float32;"]),
    ("--model_dtype float16 --lora_rank 8", []),
    ("--mixed_precision_dtype float16", []),
])  # fmt: skip
def test_settings_that_seldom_help_get_one_remark(flags, words):
    notes = load(None, *NO_WANDB, *shlex.split(flags)).notes
    assert len(notes) == bool(words)
    assert all(re.search(word, notes[0]) for word in words)


def test_yaml_anchors_and_merges_work(tmp_path):
    text = "environments: [{name: a, kwargs: &k {x: 1, y: 2}}]\nevals: [{name: a, kwargs: {<<: *k, y: 3}}]"
    assert load(write(tmp_path, text)).config.evals[0].kwargs == {"x": 1, "y": 3}


def test_a_run_that_sets_nothing_special_has_no_notes_nor_has_one_with_a_list_of_trackers(run_yaml):
    assert load(run_yaml, "--use_wandb", "false").notes == []
    loaded = load(None, *NO_WANDB[:2], "--trackers", "[tensorboard]")
    assert (loaded.config.use_wandb, loaded.notes) == (False, [])


@pytest.mark.parametrize("algorithm", ALGORITHM_FACTS)
def test_every_algorithm_can_be_chosen_by_its_name_alone(algorithm):
    loaded = load(None, *NO_WANDB, "--algorithm", algorithm)
    assert loaded.config.algorithm == algorithm
    assert not any("No effect" in note for note in loaded.notes)


@pytest.mark.parametrize(("flags", "ending"), [
    ([], "; the loss does not."),
    (["--use_tis", "true"], "and so do importance weights against the engine. top_p 1 avoids it."),
    (["--kl_penalty_tau", "0.1"], "and so do importance weights against the engine. top_p 1 avoids it."),
    (["--algorithm", "cispo"], 'the ratio that cispo bounds. Set ppo_clip_ref_logprobs to "batch", or top_p to 1.'),
    (["--use_ppo_clip", "true"], 'grpo bounds. Set ppo_clip_ref_logprobs to "batch", or top_p to 1.'),
    (["--use_ppo_clip", "true", "--ppo_clip_ref_logprobs", "batch"], "; the loss does not."),
    (
        ["--algorithm", "gspo", "--clip_low", "3e-4", "--clip_high", "4e-4"],
        'nothing from answers worse than their group. Set ppo_clip_ref_logprobs to "batch", or top_p to 1.',
    ),
])  # fmt: skip
def test_top_p_is_remarked_with_its_effect_on_importance_ratios(flags, ending):
    (note,) = load(None, *NO_WANDB, "--top_p", "0.9", *flags).notes
    assert note.startswith("top_p is 0.9: ")
    assert "up to 0.11 nats above" in note
    assert note.endswith(ending)
    assert load(None, *NO_WANDB, "--top_p", "1").notes == []


@pytest.mark.parametrize(("algorithm", "ending"), [("rloo", "is its reward."), ("reinforce_pp", "over the batch.")])
def test_a_group_of_one_is_remarked(algorithm, ending):
    notes = load(None, *NO_WANDB, "--algorithm", algorithm, "--group_size", "1").notes
    assert notes[-1].startswith("group_size is 1: a sample has nothing to be compared with")
    assert notes[-1].endswith(ending)


@pytest.mark.parametrize("flags", [["--seed", "1", "--seed", "2"], ["--wandb_run_name=1", "--wandb-run-name=2"]])
def test_a_flag_given_twice_is_an_error_that_names_both_values(flags):
    with pytest.raises(ConfigError, match=r"is given twice: '1' and '2'"):
        parse_overrides(flags)
