"""Imports between packages point downwards, so no package is part of a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "telescope"
LAYERS = (
    ("__main__",), ("cli",), ("testing", "tui", "verify"), ("dashboard", "orchestrator"),
    ("evals", "trackers"), ("cluster",), ("rollout",), ("inference", "trainer"), ("record", "tiny_model", "weights"),
    ("algorithms", "environments", "health"), ("config",), ("sandbox",), ("utils",), ("errors",),
)  # fmt: skip
"""Packages from top to bottom. Each may import packages of lower layers, also inside functions and for types alone."""

RANK = {package: rank for rank, layer in enumerate(reversed(LAYERS)) for package in layer}


def package_of(path: Path, source: Path) -> str:
    return path.relative_to(source).parts[0].removesuffix(".py")


def imported_modules(path: Path, source: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the module of every import of Telescope's in a file, wherever it stands."""
    package = ["telescope", *path.relative_to(source).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"telescope.{alias.name}" for alias in node.names] if module == "telescope" else [module]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.startswith("telescope."))


def upward_imports(source: Path) -> list[str]:
    """Returns each import of a package that is not below the importing one, with the fix."""
    found = []
    for path in sorted(source.rglob("*.py")):
        importer = package_of(path, source)
        for line, module in imported_modules(path, source):
            imported = module.split(".")[1]
            if imported != importer and imported in RANK and RANK[imported] >= RANK.get(importer, -1):
                found.append(
                    f"src/telescope/{path.relative_to(source)}:{line} imports {module}, but {importer} is not above "
                    f"{imported} (LAYERS in {Path(__file__).name}). Move what it needs below {importer}, or the code "
                    f"that needs it above {imported}"
                )
    return found


def test_every_package_has_one_layer() -> None:
    packages = {package_of(path, SOURCE) for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert sorted(package for layer in LAYERS for package in layer) == sorted(packages)


def test_the_document_has_the_layers_below_main() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    shown = page.partition("## Packages\n\n")[2].partition("\n\n")[0].split("->")
    assert [tuple(layer.replace(" ", "").strip().split(",")) for layer in shown] == list(LAYERS[1:])


def test_packages_import_only_what_is_below_them() -> None:
    assert not (found := upward_imports(SOURCE)), "\n".join(found)


@pytest.mark.parametrize("statement", [
    "from telescope.evals.base import eval_spec",
    "import telescope.evals",
    "from telescope import evals",
    "from ..evals import base",
    "def late():\n    from telescope.evals import base",
    "if TYPE_CHECKING:\n    from telescope.evals import base",
])  # fmt: skip
def test_an_upward_import_is_found_wherever_it_stands(statement: str, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "loader.py").write_text(f"from telescope.utils import text\n{statement}\n")
    (found,) = upward_imports(tmp_path)
    assert found.startswith(f"src/telescope/config/loader.py:{2 + statement.count(chr(10))} imports telescope.evals")
    assert "but config is not above evals" in found
