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
from telescope.config.generate import FieldDescription, default_yaml, describe_all, describe_section
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


ONLY_CHECKED = {"megatron_global_batch_size", "inference_kv_cache_gib"}
"""A field that may only have the value of another field, and one that `memory.cpu_kv_cache_gib` resolves."""


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


def test_the_pages_advise_only_to_set_fields_that_exist():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "dashboard" / "src").rglob("*.tsx")]
    advised = {name for text in sources for name in re.findall(r"\b[Ss]et ([a-z]+(?:_[a-z]+)+)", text)}
    assert advised <= set(TelescopeConfig.model_fields)
