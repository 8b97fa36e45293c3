"""The pages of docs/ are complete, and what they show is accepted: commands, configurations, names of fields."""

import ast
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from tests.documented_metrics import undocumented
from tests.repository_modules import load_script

from telescope.config import EnvironmentEntry, EvalEntry, TelescopeConfig
from telescope.config.loader import parse_overrides
from telescope.config.other_names import FIELD_OF, SENTENCE_OF

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FIELDS = {*TelescopeConfig.model_fields, *EnvironmentEntry.model_fields, *EvalEntry.model_fields}
with load_script("site_hooks") as hooks:
    pass


def blocks(page: Path, language: str) -> list[str]:
    """Returns the fenced blocks of a language; "" is those without one."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def site() -> dict:
    text = (ROOT / "mkdocs.yml").read_text()
    return yaml.safe_load(re.sub(r"!!python\S*|!ENV", "", text))


def test_every_page_is_in_the_navigation_and_in_the_list_of_documents():
    names = {page.name for page in PAGES}
    assert sorted(hooks.pages_of(site()["nav"])) == sorted(names)
    assert set(dict(hooks.SUMMARY.findall((DOCS / "README.md").read_text()))) == names - {"README.md"}


def test_language_models_get_the_list_and_the_text_of_all_pages():
    texts = hooks.texts_for_models(site()["nav"], DOCS, "Telescope", "About.")
    start = "# Telescope\n\n> About.\n\n## Start\n\n- [Get started](get-started.md): How to"
    assert texts["llms.txt"].startswith(start)
    assert all(page.read_text().strip() in texts["llms-full.txt"] for page in PAGES if page.name != "README.md")


def test_a_page_of_the_site_has_titles_and_lists_and_no_links_into_the_checkout():
    text = "See [evals.md](evals.md#numbers):\n- [a](../src/a.py)\n- b\n\n```\nSee:\n- [a](../src/a.py)\n```\n"
    code = text[text.index("```") :]
    assert hooks.for_site(text, DOCS, "") == f"See [Evals](evals.md#numbers):\n\n- a\n- b\n\n{code}"
    assert "- [a](https://x.org/blob/main/src/a.py)\n" in hooks.for_site(text, DOCS, "https://x.org/")
    assert hooks.for_site('<a href="../src/b.py">b</a>', DOCS, "") == "b"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_shown_command_is_accepted(page: Path):
    lines = "\n".join(block for name in ("", "bash") for block in blocks(page, name)).replace("\\\n", " ")
    for line in re.findall(r"^(?:\S*/)?telescope (.*)$", lines, re.MULTILINE):
        name, *argv = shlex.split(line, comments=True)
        parsed = import_module(f"telescope.cli.{name.replace('-', '_')}").build_parser().parse_args(argv)
        if name == "train":
            parse_overrides(parsed.fields)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shown_code_parses_and_shown_configurations_have_fields(page: Path):
    for block in blocks(page, "python"):
        ast.parse(block)
    for block in blocks(page, "yaml"):
        assert isinstance(shown := yaml.safe_load(block), dict)
        assert not shown.keys() - FIELDS


def test_the_names_of_other_frameworks_are_translated_as_by_the_error_message():
    tables = (DOCS / "migration.md").read_text().partition("## From TRL")[2].partition("## Metrics")[0]
    rows = re.findall(r"^\| (`.*?`) \| (`.*?`) \|", tables, re.MULTILINE)
    assert len(rows) > 50
    for theirs, ours in rows:
        fields = [span.partition(":")[0] for span in re.findall(r"`([^`]+)`", ours)]
        assert not set(fields) - FIELDS
        for name in re.findall(r"`([^`=]+)(?:=[^`]*)?`", theirs):
            meant = next((FIELD_OF[end] for end in _ends(name) if end in FIELD_OF), None)
            assert meant is None or meant in fields, f"{name}: {meant} in an error, {ours} in the table"
            known = {*FIELDS, *SENTENCE_OF}
            assert meant or known & {*_ends(name), *(f"{part}." for part in name.split("."))}, f"{name}: no error"


def test_the_metrics_beside_those_of_other_frameworks_are_documented():
    table = (DOCS / "migration.md").read_text().partition("## Metrics")[2]
    cells = [line.split("|")[-2] for line in table.splitlines() if line.startswith("| ")][1:]
    names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert len(names) > 20
    other = {"evals", "eval/<name>/<metric>"}  # a table, and names of trackers
    assert not undocumented(re.sub(r"<\w+>", "x", name) for name in names - other)


def _ends(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
