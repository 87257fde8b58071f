"""Commands that README.md and docs/kubernetes/install.md tell people to type."""

from __future__ import annotations

import re
import shlex

from cluster import ROOT

_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def block(document: str, heading: str) -> str:
    """The first shell block below a heading."""
    text = (ROOT / document).read_text()
    begin = text.index(f"## {heading}\n")
    found = _BLOCK.search(text, begin)
    assert found, f"{document}: no shell block below {heading!r}"
    return found[1]


def shown(document: str, heading: str) -> list[list[str]]:
    """The lines of that block, in words."""
    return [
        shlex.split(line, comments=True) for line in block(document, heading).splitlines() if line.strip()
    ]


def _bash(heading: str) -> str:
    """The first block for bash below a heading of README.md."""
    found = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
    text = (ROOT / "README.md").read_text()
    lines = found.search(text, text.index(f"## {heading}\n"))
    assert lines, f"README.md: no block for bash below {heading!r}"
    return lines[1]


ATTACHED_JOB = _bash("Pods of other controllers")
FIRST_JOB = shown("README.md", "The same job on a cluster")
UPGRADE = shown("docs/kubernetes/install.md", "Upgrade and uninstall")


def words(block: list[list[str]], *begin: str) -> list[str]:
    """The one line that begins so."""
    (found,) = (line for line in block if tuple(line[: len(begin)]) == begin)
    return found
