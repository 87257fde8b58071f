"""Measures what is named, and writes results and page: see the package."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.model import known, page, real, running, simulated

RESULTS = Path(__file__).with_name("results.json")
PARTS: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[[], Iterable[Any]], str]] = {
    "simulated": (simulated.row, simulated.pipelines, "name"),
    "real": (real.row, lambda: real.PIPELINES, "name"),
    "known": (known.row, lambda: known.KNOWN, "what"),
    "running": (running.row, lambda: running.RUNNING, "what"),
}
"""By part: what makes a row of a pipeline, the pipelines, and the name that both have."""


def main(words: list[str]) -> int:
    """`part` measures a part again, `part=name` one pipeline of it."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for word in [word for word in words if word != "page"] or (() if words else PARTS):
        part, _, only = word.partition("=")
        make, pipelines, key = PARTS[part]
        rows = {row[key]: row for row in found.get(part, ())}
        for one in pipelines():
            name = getattr(one, key)
            if not only or name == only:
                rows[name] = make(one)
                print(rows[name], flush=True)
        found[part] = [rows[getattr(one, key)] for one in pipelines() if getattr(one, key) in rows]
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    page.PAGE.write_text(page.page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
