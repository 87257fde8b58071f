"""No module of the packages needs, by whatever way, a module that needs it; also not for types alone."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "sidecar" / "dataloaderjob", ROOT / "operator" / "dataloaderjob_operator"]


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in package.rglob("*.py")
    }


def imports(tree: ast.AST, known: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                whole if (whole := f"{node.module}.{alias.name}") in known else node.module
                for alias in node.names
            }
    return found & known.keys()


def in_order(graph: dict[str, set[str]]) -> list[str]:
    return list(graphlib.TopologicalSorter(graph).static_order())


def test_no_modules_form_an_import_cycle() -> None:
    known = modules()
    graph = {name: imports(ast.parse(path.read_text()), known) - {name} for name, path in known.items()}
    assert len(in_order(graph)) == len(known) > 100


def test_import_cycle_is_found_even_if_it_is_for_types_only() -> None:
    known = {"a": Path(), "b": Path()}
    text = "if TYPE_CHECKING:\n    from a import Name"
    with pytest.raises(graphlib.CycleError):
        in_order({"a": {"b"}, "b": imports(ast.parse(text), known)})
