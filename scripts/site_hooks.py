"""Adapts docs/ to the site: links into the repository, lists as GitHub reads them, llms.txt and llms-full.txt.

MkDocs calls the functions `on_...` (mkdocs.yml).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
OUTSIDE = re.compile(r'\[([^\]]*)\]\(\.\./([^)]*)\)|<a href="\.\./([^"]*)">(.*?)</a>')
LIST_AFTER_TEXT = re.compile(r"^((?!\s*(?:[-*]|\d+\.) |\s*$|#|\||<).+\n)(?=(?:[-*]|1\.) )", re.MULTILINE)
LABEL = re.compile(r"\[([\w-]+\.md)\](?=\([\w-]+\.md)")
SUMMARY = re.compile(r"^\| \[[^\]]*\]\(([\w-]+\.md)\) \| (.*) \|$", re.MULTILINE)


def outside_code(text: str, change: Any) -> str:
    """Returns Markdown with `change` applied to what is between its fenced blocks."""
    return "".join(piece if number % 2 else change(piece) for number, piece in enumerate(FENCE.split(text)))


def title(page: Path) -> str:
    """Returns the heading of a page."""
    return page.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def for_site(text: str, docs: Path, repo_url: str) -> str:
    """Returns a page of `docs` as the site shows it.

    Lists get the blank line before them that Python-Markdown needs. The name of a page in a link becomes its title. A
    link out of `docs` leads to `repo_url`; without that, it becomes its text.
    """

    def link(match: re.Match[str]) -> str:
        label, path = match[1] or match[4], match[2] or match[3]
        url = f"{repo_url.rstrip('/')}/blob/main/{path}"
        return label if not repo_url else f"[{label}]({url})" if match[1] else f'<a href="{url}">{label}</a>'

    def change(piece: str) -> str:
        titled = LABEL.sub(lambda match: f"[{title(docs / match[1])}]", piece)
        return LIST_AFTER_TEXT.sub(r"\1\n", OUTSIDE.sub(link, titled))

    return outside_code(text, change)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Changes a page before it is rendered."""
    return for_site(markdown, Path(config["docs_dir"]), config["repo_url"] or "")


def pages_of(nav: list[Any]) -> list[str]:
    """Returns the files of a navigation in its order."""
    return [page for item in nav for page in ([item] if isinstance(item, str) else pages_of(next(iter(item.values()))))]


def texts_for_models(nav: list[Any], docs: Path, name: str, about: str) -> dict[str, str]:
    """Returns llms.txt (https://llmstxt.org), with the sentences of docs/README.md, and llms-full.txt, by name."""
    summaries = dict(SUMMARY.findall((docs / "README.md").read_text(encoding="utf-8")))
    lines, full = [f"# {name}\n\n> {about}"], []
    for section in nav:
        heading, pages = next(iter(section.items()))
        pages = [page for page in pages if page != "README.md"]
        entries = [f"- [{title(docs / page)}]({page}): {summaries[page]}" for page in pages]
        lines.append("\n".join([f"## {heading}\n", *entries]))
        full += [(docs / page).read_text(encoding="utf-8") for page in pages]
    return {"llms.txt": "\n\n".join(lines) + "\n", "llms-full.txt": "\n\n".join(full)}


def on_post_build(*, config: Any) -> None:
    """Writes the files for language models, and the Markdown of each page beside its HTML."""
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    for page in pages_of(config["nav"]):
        (site / page).write_bytes((docs / page).read_bytes())
    for name, text in texts_for_models(config["nav"], docs, config["site_name"], config["site_description"]).items():
        (site / name).write_text(text, encoding="utf-8")
