"""Every path that CONTRIBUTING.md and docs/architecture.md name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "telescope"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def paths_of(page: Path) -> set[str]:
    """Paths in code spans and in prose that name a folder or a file with an ending."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    spans = [span.split()[0] for span in re.findall(r"`([^`\n]+)`", text)]
    files = {span for span in spans if re.fullmatch(r"[\w./-]+(/|\.(py|md|in|txt|yaml))", span)}
    return files | set(re.findall(r"\bdocs/\w+\.md\b", text))


def links_of(page: Path) -> set[str]:
    text = page.read_text()
    found = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'href="([^"]+)"', text)
    return {link for link in found if "://" not in link}


@pytest.mark.parametrize("page", [CONTRIBUTING, ARCHITECTURE], ids=lambda page: page.name)
def test_every_named_path_exists(page: Path):
    named = paths_of(page)
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists() and not (PACKAGE / path).exists()] == []


@pytest.mark.parametrize("page", [*sorted((ROOT / "docs").glob("*.md")), CONTRIBUTING], ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path):
    for link in sorted(links_of(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def anchors_of(page: Path) -> list[str]:
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
