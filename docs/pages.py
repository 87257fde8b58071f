"""Copies the documents into build/docs, from which `make docs` builds the site: `python docs/pages.py`.

Files keep their paths, so a link that works in the repository works in the site. Copied are the pages in the `nav` of
mkdocs.yml, and pictures and other files that those pages link to.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "build" / "docs"
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def paths() -> list[str]:
    """Returns the paths of all pages of the site, in the order of its navigation."""
    return list(_leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


def _leaves(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        for child in node.values() if isinstance(node, dict) else node:
            yield from _leaves(child)


def linked(page: str) -> set[Path]:
    """Returns the files that a page links to, except other pages. Broken links are skipped; the build reports them."""
    path = ROOT / page
    targets = {(path.parent / target).resolve() for target in _LINK.findall(path.read_text())}
    return {target for target in targets if target.is_file() and target.suffix != ".md"}


def main() -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    styles = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["extra_css"]
    for source in {ROOT / path for path in (*paths(), *styles)}.union(*map(linked, paths())):
        copy = TARGET / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)


if __name__ == "__main__":
    main()
