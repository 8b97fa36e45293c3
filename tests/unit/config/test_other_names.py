"""Names of other frameworks are answered with what stands for them here."""

import pytest

from telescope.config import load_config
from telescope.config.eval_config import SHARED_FIELDS
from telescope.config.loader import parse_overrides
from telescope.config.other_names import FIELD_OF, NAMES, SENTENCE_OF, hint
from telescope.config.schema import TelescopeConfig
from telescope.errors import ConfigError
from telescope.utils.text import nearest_name

KNOWN = TelescopeConfig.model_fields


def test_the_tables_name_fields_that_exist_once():
    assert not NAMES["fields"].keys() - KNOWN.keys()
    assert not FIELD_OF.keys() & SENTENCE_OF.keys()
    assert not (FIELD_OF.keys() | SENTENCE_OF.keys()) & KNOWN.keys()
    assert len(FIELD_OF) == sum(len(names.split()) for names in NAMES["fields"].values())
    assert len(SENTENCE_OF) == sum(len(one["names"].split()) for one in NAMES["sentences"])


@pytest.mark.parametrize(("name", "words"), [
    ("eval_every", "an entry of evals"), ("reward_max", "an entry of environments"),
    ("beta", "kl_penalty_tau"), ("num_train_epochs", "number_of_steps"),
    ("reward_funcs", "reward: file.py:function"), ("data.max_prompt_length", "prompt and answer together"),
    ("per_device_train_batch_size", "prompts_batch_size_for_trainer x group_size"),
    ("num_generations", "'group_size'"), ("max_completion_length", "'max_tokens'"),
    ("num_iterations", "number_of_minibatches"), ("epsilon", "use_ppo_clip"), ("epsilon_high", "'clip_high'"),
    ("rollout.n", "'group_size'"), ("actor_rollout_ref.rollout.n", "'group_size'"),
    ("actor_rollout_ref.rollout.temperature", "'temperature'"),
    ("actor_rollout_ref.actor.optim.lr", "'learning_rate'"), ("actor_rollout_ref.model.path", "'model'"),
    ("actor_rollout_ref.actor.kl_loss_coef", "kl_penalty_tau"),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size", "'inference_tensor_parallel_size'"),
    ("data.train_files", "environments: [{name"),
    ("data.train_batch_size", "'prompts_batch_size_for_trainer'"),
    ("algorithm.adv_estimator", "'algorithm'"), ("trainer.total_epochs", "number_of_steps"),
    ("importance_sampling_level", "gspo"), ("reward_weights", "reward: {file.py:one: 1.0"),
    ("generation_batch_size", "prompts_batch_size_for_trainer"), ("peft_config", "lora_rank (r)"),
    ("actor_rollout_ref.rollout.val_kwargs.temperature", "Each entry of evals"),
    ("critic.optim.lr", "There is no critic"), ("actor_rollout_ref.rollout.multi_turn.enable", "docs/tools.md"),
    ("algorithm.rollout_correction.rollout_is", "'use_tis'"), ("deepspeed", "train_backend"),
    ("optimizer", "AdamW"), ("trainer.logger", "'trackers'"), ("max-steps", "'number_of_steps'"),
    ("grad_clp", "'grad_clip'"),
])  # fmt: skip
def test_a_name_of_another_framework_is_translated(name, words):
    with pytest.raises(ConfigError, match=f"Unknown configuration field '{name}'") as flag:
        parse_overrides([f"--{name}=1"])
    assert words in str(flag.value)
    with pytest.raises(ConfigError, match="Unexpected argument") as bare:
        parse_overrides([f"{name}=1"])
    assert words in str(bare.value)


def test_an_algorithm_of_another_framework_is_translated():
    with pytest.raises(ConfigError, match="DAPO is grpo with use_ppo_clip true"):
        load_config(None, ["--environments", "[{name: countdown}]", "--algorithm", "dapo"], {})


def test_a_file_of_another_framework_is_translated(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text(
        "data: {train_files: a.parquet, max_response_length: 512}\n"
        "actor_rollout_ref: {rollout: {n: 8, temperature: 0.7}, actor: {optim: {lr: 1e-6}, use_kl_loss: true}}\n"
        "odd: {thing: 1}\n"
        "critic: {optim: {lr: 1e-5}}\n"
        "algorithm: {adv_estimator: rloo}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_config(file, [], {})
    data, actor, odd, critic, algorithm = raised.value.problems
    assert "max_response_length is max_tokens without 'data'. Data belongs to an environment" in data
    assert "rollout.n is group_size, rollout.temperature is temperature, actor.optim.lr is learning_rate" in actor
    assert "There is no reference model" in actor
    assert "Unknown configuration field 'odd' " in odd
    assert "There is no critic" in critic and "learning_rate" not in critic
    assert "The file is flat: write adv_estimator is algorithm without 'algorithm'" in algorithm


def test_only_fields_of_the_command_are_suggested():
    assert "group_size" not in hint("num_generations", SHARED_FIELDS)
    assert nearest_name("lr", KNOWN) != "learning_rate"
