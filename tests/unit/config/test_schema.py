"""The schema holds every documented field with its default, and a resolved configuration cannot be changed."""

import copy
import json
import pickle

import pytest
from pydantic import ValidationError

from telescope.config import EnvironmentEntry, EvalEntry, TelescopeConfig
from telescope.config.base import Section, accepts, freeze
from telescope.config.schema import SECTIONS

COUNTDOWN = [{"name": "countdown"}]


def config(**values: object) -> TelescopeConfig:
    return TelescopeConfig(**{"environments": COUNTDOWN, **values})


def numeric_fields() -> list[tuple[type[Section], str]]:
    fields = [(kind, name) for kind in [*SECTIONS, EnvironmentEntry, EvalEntry] for name in kind.model_fields]
    return [(kind, name) for kind, name in fields if accepts(kind, name, int) or name.endswith(("_seconds", "_s"))]


@pytest.mark.parametrize(("section", "name"), numeric_fields(), ids=lambda value: getattr(value, "TITLE", value))
def test_no_number_is_without_an_upper_bound(section, name):
    values = {"name": "a"} if section in (EnvironmentEntry, EvalEntry) else {}
    with pytest.raises(ValidationError, match=name):
        section(**values, **{name: 10**30})


@pytest.mark.parametrize("name", ["run_dir", "checkpoint_dir", "chat_template", "model", "wandb_run_name"])
def test_no_text_is_blank(name):
    for text in ("", " "):
        with pytest.raises(ValidationError, match=name):
            config(**{name: text})


@pytest.mark.parametrize("address", ["9400", ":9400", "host:", "host:x", "a host:9400", "host:99999", "host:0", ""])
def test_an_address_for_prometheus_has_a_host_and_a_port(address):
    with pytest.raises(ValidationError, match="it must be HOST:PORT"):
        config(prometheus_address=address)
    assert config(prometheus_address="[::1]:9400").prometheus_address == "[::1]:9400"


def test_sections_hold_every_field_once_and_in_order():
    assert [name for section in SECTIONS for name in section.model_fields] == list(TelescopeConfig.model_fields)


def test_a_field_cannot_be_assigned():
    with pytest.raises(ValidationError):
        config().learning_rate = 1.0


@pytest.mark.parametrize("change", [
    lambda c: c.wandb_tags.append("x"),
    lambda c: c.wandb_tags.__setitem__(0, "x"),
    lambda c: c.environments.clear(),
    lambda c: c.environments[0].kwargs.update(a=1),
    lambda c: c.environments[0].kwargs["nested"]["deep"].append(1),
    lambda c: c.environments[0].kwargs["nested"].pop("deep"),
    lambda c: c.ray_runtime_env["env_vars"].setdefault("A", "b"),
])  # fmt: skip
def test_nothing_inside_a_config_can_be_changed(change):
    frozen = config(
        environments=[{"name": "a", "kwargs": {"nested": {"deep": [1]}}}], ray_runtime_env={"env_vars": {"A": "1"}}
    )
    before = frozen.to_json()
    with pytest.raises(TypeError, match="frozen"):
        change(frozen)
    assert frozen.to_json() == before


def test_two_configs_do_not_share_their_defaults():
    assert config().wandb_tags is not config().wandb_tags


def test_frozen_values_survive_pickling_and_copying_and_stay_frozen():
    value = freeze({"a": [1, {"b": (2, 3)}]})
    for copied in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert copied == {"a": [1, {"b": [2, 3]}]}
        with pytest.raises(TypeError):
            copied["a"].append(4)
    assert json.loads(json.dumps(value)) == value


def test_a_pickled_config_is_the_same_config():
    original = config(learning_rate=3e-4)
    restored = pickle.loads(pickle.dumps(original))
    assert (restored, restored.hash, restored.user_set) == (original, original.hash, original.user_set)


def test_replace_validates_and_counts_as_chosen():
    changed = config(seed=1).replace(learning_rate=1e-3)
    assert changed.learning_rate == 1e-3
    assert changed.user_set == {"environments", "seed", "learning_rate"}
    with pytest.raises(ValidationError):
        changed.replace(learning_rate=-1)


def test_a_boolean_is_not_read_as_a_number():
    for field in ("group_size", "learning_rate", "seed"):
        with pytest.raises(ValidationError, match="boolean"):
            config(**{field: True})
    assert config(checkpoint_every=False).checkpoint_every is False
    assert config(checkpoint_every=50).checkpoint_every == 50
    assert config(resume_from_checkpoint=True).resume_from_checkpoint is True


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, {"a": {"b"}}])
def test_what_json_cannot_carry_is_refused_in_free_form_values(value):
    with pytest.raises(ValidationError):
        config(environments=[{"name": "a", "kwargs": {"x": value}}])


def test_derived_numbers():
    eight = config(inference_num_workers=8, inference_tensor_parallel_size=2, max_concurrent_prompts_per_server=4)
    assert eight.num_inference_servers == 4
    assert eight.lanes_per_server == 32
    assert config().engine_dtype == "bfloat16"
    assert config(mixed_precision_dtype=None).engine_dtype == "float32"
    assert config(inference_dtype="float16").engine_dtype == "float16"
    assert config(inference_dtype="float32").precisions == ("float32", "bfloat16")
