"""ARCHITECTURE.md and the pages on protocols and changes name files that exist; each recipe for a change has steps, and
names what its files contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT, links

BASES = (ROOT, ROOT / "sidecar/dataloaderjob", ROOT / "operator/dataloaderjob_operator")
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
CHANGES = (ROOT / "docs/internals/changes.md").read_text()
PAGES = [TEXT, CHANGES, (ROOT / "docs/internals/protocols.md").read_text()]
PATH = re.compile(r"`([\w.*/-]+(?:\.(?:py|md|toml|ya?ml|json|tpl|txt)|/)|[\w./-]*Dockerfile[\w.]*|Makefile)`")
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`")
RECIPES = {
    title: body
    for title, _, body in (
        section.partition("\n") for section in re.split(r"^### ", CHANGES, flags=re.MULTILINE)[1:]
    )
}
TESTED_BY = ("tests/", "e2e/")


def files(path: str) -> Iterator[Path]:
    """Files at a path, which may be a folder or a pattern, below each of BASES."""
    for base in BASES:
        for found in base.glob(path):
            yield from found.rglob("*.*") if found.is_dir() else [found]


def names(recipe: str) -> set[str]:
    """Words of the code that a recipe mentions, each part of a dotted one by itself."""
    found = {name for name in NAME.findall(recipe) if not PATH.fullmatch(f"`{name}`")}
    return {part for name in found for part in name.split(".")}


def contains(path: Path, word: str) -> bool:
    if path.suffix in (".pyc", ".png"):
        return False
    return re.search(rf"\b{re.escape(word)}\b", path.read_text()) is not None


@pytest.mark.parametrize("path", sorted({path for page in PAGES for path in PATH.findall(page)}))
def test_each_documented_path_exists(path):
    assert any(list(base.glob(path)) for base in BASES)


def test_the_architecture_links_to_the_recipes():
    assert "docs/internals/changes.md" in links(ROOT / "ARCHITECTURE.md")
    assert len(RECIPES) > 70


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_has_numbered_steps_that_end_with_its_tests(title):
    recipe = RECIPES[title].split("\n## ")[0]
    steps = re.split(r"^\d+\. ", recipe, flags=re.MULTILINE)[1:]
    assert re.findall(r"^(\d+)\. ", recipe, re.MULTILINE) == [str(n + 1) for n in range(len(steps))]
    assert all(PATH.search(step) or "`make " in step for step in steps)
    assert any(path.startswith(TESTED_BY) for step in steps[-2:] for path in PATH.findall(step))


@pytest.mark.parametrize("title", RECIPES)
def test_each_name_in_a_recipe_is_in_one_of_its_files(title):
    recipe = RECIPES[title].split("\n## ")[0]
    found = [file for path in PATH.findall(recipe) for file in files(path)]
    assert [name for name in sorted(names(recipe)) if not any(contains(file, name) for file in found)] == []


def test_removed_name_is_detected():
    assert names("`Epoch.state` in `trainer/resume/progress.py`, `make test`, `tail=`") == {"Epoch", "state"}
    (progress,) = files("trainer/resume/progress.py")
    assert contains(progress, "new_epoch")
    assert not contains(progress, "old_epoch")
