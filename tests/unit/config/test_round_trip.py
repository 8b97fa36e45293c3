"""A configuration written by one process is read by others with the same values and hash."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.config import TelescopeConfig, load_config
from telescope.config.generate import resolved_yaml
from telescope.config.loader import load_resumed_config
from telescope.config.yaml_file import _ConfigLoader, dump_yaml
from telescope.orchestrator.resume import changed_fields

LIKE_OTHER_TYPES = [
    "08", "010", "0o17", "0x1F", "1_000", "1e3", "1.5e-6", "4e7a91", "yes", "Off", "null", "~", "", "=", "<<", "-",
    "2024-01-01", "12:30", "1:30:00", ".inf", ".nan", "nan", "#a", "a: b", "a #b", "!t", "&a", "*a", "{a}", "[1]",
    "a\nb\n", "\n\n a", " a ", "\u2028", "\x85", "\x00", "\ufeff", "\U0001f600", "%a", "@a", "`a", "'", '"', "---",
    "...", "\t", "? a",
]  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(LIKE_OTHER_TYPES)
WORD = TEXT.filter(lambda text: bool(text.strip()) and "\0" not in text)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
KWARGS = st.dictionaries(TEXT, PLAIN, max_size=3)
POSITIVE = st.floats(min_value=1e-12, max_value=1e6, exclude_min=True)
ENVIRONMENTS = st.lists(
    st.fixed_dictionaries({"name": WORD, "weight": POSITIVE, "kwargs": KWARGS}),
    min_size=1,
    max_size=3,
    unique_by=lambda entry: entry["name"],
)
FIELDS = {
    "learning_rate": POSITIVE.filter(lambda rate: rate <= 100), "weight_decay": st.floats(min_value=0, max_value=10),
    "seed": st.integers(0, 2**63 - 1), "number_of_steps": st.integers(1, 10**6), "group_size": st.integers(1, 512),
    "top_p": st.none() | st.floats(min_value=0, max_value=1, exclude_min=True),
    "debug": st.booleans(),
    "mixed_precision_dtype": st.none() | st.sampled_from(["float32", "float16", "bfloat16"]),
    "checkpoint_every": st.just(False) | st.integers(0, 1000),
    "resume_from_checkpoint": st.booleans() | st.integers(1, 1000),
    "chat_template": st.none() | WORD.map("{{ 1 }}".__add__),
    "wandb_tags": st.lists(WORD, max_size=3), "ray_runtime_env": st.none() | KWARGS,
    "max_off_policy_steps": st.integers(-1, 100),
    "inference_tensor_parallel_size": st.sampled_from([1, 2, 4]),
    "algorithm": st.sampled_from(["grpo", "reinforce_pp", "dr_grpo"]),
    "enable_individual_sample_lanes": st.booleans(),
}  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> TelescopeConfig:
    chosen = draw(st.sets(st.sampled_from(sorted(FIELDS))))
    values = {name: draw(FIELDS[name]) for name in sorted(chosen)}
    return TelescopeConfig(environments=draw(ENVIRONMENTS), **values)


@settings(deadline=None, max_examples=40)
@given(configs())
def test_json_round_trip_keeps_values_hash_and_what_the_user_set(config):
    restored = TelescopeConfig.from_json(config.to_json())
    assert restored == config
    for name in ("values", "hash", "user_set"):
        assert getattr(restored, name) == getattr(config, name)
    assert restored.to_json() == config.to_json()


@settings(deadline=None, max_examples=30)
@given(configs())
def test_a_resumed_run_reads_the_values_that_it_wrote(config):
    with tempfile.TemporaryDirectory() as folder:
        config = config.replace(resume_from_checkpoint=True, run_dir=folder)
        (Path(folder) / "config.yaml").write_text(dump_yaml(config.values))
        assert load_resumed_config(Path(folder)).config.values == config.values
        assert changed_fields(config.values, load_resumed_config(Path(folder)).config) == ({}, {})
        (Path(folder) / "shown.yaml").write_text(resolved_yaml(config))
        assert load_config(Path(folder, "shown.yaml"), [], {}).config.values == config.values


@pytest.mark.parametrize("text", LIKE_OTHER_TYPES)
@pytest.mark.parametrize("wrap", [str, lambda text: [text, {text: text}]])
def test_text_is_text_to_readers_of_both_versions_of_yaml(text, wrap):
    written = dump_yaml({"kwargs": {"value": wrap(text)}})
    assert yaml.load(written, Loader=_ConfigLoader) == {"kwargs": {"value": wrap(text)}}
    assert yaml.safe_load(written) == {"kwargs": {"value": wrap(text)}}


@settings(deadline=None, max_examples=40)
@given(configs(), st.sampled_from([("seed", 12345), ("group_size", 600), ("debug", None)]))
def test_the_hash_changes_with_any_value(config, change):
    name, value = change
    other = config.replace(**{name: not config.debug if value is None else value})
    assert (other.hash == config.hash) == (other.values == config.values)


@settings(deadline=None, max_examples=40)
@given(configs())
def test_the_hash_does_not_depend_on_the_order_of_fields_or_on_who_chose_them(config):
    backwards = TelescopeConfig(**dict(reversed(config.values.items())))
    assert backwards.hash == config.hash


def test_another_process_computes_the_same_hash():
    config = TelescopeConfig(
        environments=[{"name": "countdown", "kwargs": {"ümlaut": [1.5, {"a": None}]}}], learning_rate=3e-7
    )
    code = (
        "import sys; from telescope.config import TelescopeConfig; "
        "c = TelescopeConfig.from_json(sys.stdin.read()); print(c.hash, sorted(c.user_set))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "WANDB_PROJECT": "elsewhere"}
    options = {"input": config.to_json(), "env": environment, "text": True, "timeout": 60}
    printed = subprocess.check_output([sys.executable, "-c", code], **options)
    assert printed.strip() == f"{config.hash} {sorted(config.user_set)}"


@pytest.mark.parametrize("text", ["{}", "[]", '{"values": {}}', json.dumps({"values": {}, "user_set": [], "x": 1})])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match="not a configuration"):
        TelescopeConfig.from_json(text)
