"""Commands that README.md and docs/kubernetes/install.md tell people to type."""

from __future__ import annotations

import re
import shlex

from cluster import ROOT


def block(document: str, heading: str, language: str = "sh") -> str:
    """The first block in a shell's language below a heading."""
    text = (ROOT / document).read_text()
    lines = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    found = lines.search(text, text.index(f"## {heading}\n"))
    assert found, f"{document}: no block for {language} below {heading!r}"
    return found[1]


def shown(document: str, heading: str) -> list[list[str]]:
    """The lines of that block, in words."""
    return [
        shlex.split(line, comments=True) for line in block(document, heading).splitlines() if line.strip()
    ]


ATTACHED_JOB = block("README.md", "Pods of other controllers", "bash")
FIRST_JOB = shown("README.md", "The same job on a cluster")
UPGRADE = shown("docs/kubernetes/install.md", "Upgrade and uninstall")


def words(block: list[list[str]], *begin: str) -> list[str]:
    """The one line that begins so."""
    (found,) = (line for line in block if tuple(line[: len(begin)]) == begin)
    return found
