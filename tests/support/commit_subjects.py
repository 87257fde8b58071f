"""Checks the subjects of commits: imperative, capitalized, at most 72 characters, no full stop. Run by `make check`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SINCE = "0e413a0"
"""Later commits keep the rules."""
MOST = 72
_NOT_A_VERB = re.compile(
    r"(?i:an?|the|this|that|these|it|its|we|i|what|whether|how|where|who|when|if|as|in|on|of|for|with|by|no|not|some|all|more|"
    r"new|one|two|wip|fixup!|squash!|temp|tmp|misc|minor|various)\b"
)
_INFLECTED = re.compile(
    r"(?!(?:Bring|Ping|Ring|String|Embed|Feed|Need|Seed|Speed|Shed|Exceed|Proceed)\b)\w+(?:ed|ing)\b"
)
_THIRD_PERSON = re.compile(r"(?!\w+(?:ss|us|as)\b)\w+s\b")


def fault(subject: str) -> str | None:
    """The rule that a subject breaks; None if it keeps all of them."""
    first = subject.split(" ", 1)[0]
    if len(subject) > MOST:
        return f"{len(subject)} characters, at most {MOST}: put the rest into the body"
    if not first[:1].isupper():
        return "begin with a capital letter"
    if subject.endswith("."):
        return "end without a full stop"
    if _NOT_A_VERB.match(subject) or _INFLECTED.match(first) or _THIRD_PERSON.match(first):
        return f"begin with a verb in the imperative, such as Add or Fix, found {first!r}"
    return None


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


def main() -> int:
    if _git("cat-file", "-e", f"{SINCE}^{{commit}}").returncode:
        sys.stderr.write(f"subjects of commits are unchecked: this copy has no history back to {SINCE}\n")
        return 0
    subjects = _git("log", "--no-merges", "--format=%h %s", f"{SINCE}..HEAD").stdout.splitlines()
    faults = [f"{line}: {found}" for line in subjects if (found := fault(line.split(" ", 1)[1]))]
    sys.stdout.write(("\n".join(faults) or f"subjects of {len(subjects)} commits keep the rules") + "\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
