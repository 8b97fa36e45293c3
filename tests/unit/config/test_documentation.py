"""Every field is described, the generated files are current, and every field that works is read somewhere."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.repository_modules import load_script

import telescope
from telescope.config import EnvironmentEntry, EvalEntry, TelescopeConfig
from telescope.config.generate import (
    FieldDescription,
    default_yaml,
    describe_all,
    describe_section,
    resolved_yaml,
    yaml_text,
)
from telescope.config.loader import load_config
from telescope.config.rules import RULES
from telescope.config.schema import SECTIONS

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(telescope.__file__).parent
ENTRIES = {"environments": EnvironmentEntry, "evals": EvalEntry}


with load_script("generate_references") as script:
    generated_files = script.generated_files


def all_descriptions() -> list[FieldDescription]:
    entries = [field for entry in ENTRIES.values() for field in describe_section(entry)]
    return describe_all() + entries


def test_every_field_is_described_in_sentences():
    for field in all_descriptions():
        assert len(field.text) > 8, f"{field.name} has no description"
        assert field.text.endswith((".", "`.", ")")), f"{field.name}: {field.text!r}"
        assert field.text[0].isupper() or field.text[0] in '`"' or field.name in field.text or field.text[0].islower()
        assert field.summary


def test_the_command_writes_the_generated_files(tmp_path):
    subprocess.run([sys.executable, ROOT / "scripts" / "generate_references.py", str(tmp_path)], check=True)
    assert {name: (tmp_path / name).read_text() for name in generated_files()} == generated_files()


@pytest.mark.parametrize("path", sorted(generated_files()))
def test_generated_files_are_current(path):
    committed = (ROOT / path).read_text(encoding="utf-8")
    assert committed == generated_files()[path], "run `python scripts/generate_references.py`"


def test_the_documentation_names_every_field_and_every_rule():
    text = generated_files()["docs/configuration.md"]
    for field in all_descriptions():
        assert f"| `{field.name}` |" in text
    for rule in RULES:
        assert rule.statement in text
    for section in SECTIONS:
        assert f"## {section.TITLE}\n" in text


def test_the_default_file_contains_exactly_the_defaults_for_any_yaml_reader():
    defaults = TelescopeConfig(environments=[{"name": "a"}]).values | {"environments": []}
    assert yaml.safe_load(default_yaml()) == defaults


def test_the_default_file_with_an_environment_is_a_run(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(default_yaml().replace("environments: []", "environments: [{name: a}]"))
    assert load_config(path, [], {}).config.values == TelescopeConfig(environments=[{"name": "a"}]).values


def test_a_resolved_configuration_reads_back_as_itself(tmp_path):
    config = TelescopeConfig(
        environments=[{"name": "a", "kwargs": {"text": 'quote " and : colon', "list": [1, None]}}],
        chat_template="{% for m in messages %}\n{{ m }}\n{% endfor %}",
        learning_rate=3e-7,
        wandb_tags=["yes", "1"],
    )
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved_yaml(config))
    assert load_config(path, [], {}).config.hash == config.hash
    assert "learning_rate: 3.0e-07  # set" in path.read_text()


@pytest.mark.parametrize(
    "value", [1e-7, 1.0, 12345678.9, "a: b", "", None, True, [], ["a"], {}, {"a": [1, {"b": None}]}]
)
def test_values_are_written_as_yaml_that_any_reader_understands(value):
    assert yaml.safe_load(f"x: {yaml_text(value)}") == {"x": value}


ONLY_CHECKED = {"megatron_global_batch_size"}
"""Fields that may only have the value of another field."""


def test_every_field_that_works_is_read_by_the_code():
    # `config` only checks and explains values: what acts on them lies outside of it, or reads one of its properties.
    code = "\n".join(
        p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py") if PACKAGE / "config" not in p.parents
    )

    def is_read(name: str) -> bool:
        return re.search(rf"\.{name}\b", code) is not None

    derived = {
        name: inspect.getsource(value.fget)
        for name, value in vars(TelescopeConfig).items()
        if isinstance(value, property) and value.fget is not None
    }
    unread = [
        prefix + name
        for schema, prefix in [(TelescopeConfig, ""), (EnvironmentEntry, "environments."), (EvalEntry, "evals.")]
        for name in schema.model_fields
        if prefix + name not in ONLY_CHECKED
        and not is_read(name)
        and not any(is_read(p) and f".{name}" in source for p, source in derived.items())
    ]
    assert not unread
