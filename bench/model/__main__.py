"""Measures what is named, and writes results and page: see the package."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.model import known, page, real, simulated

RESULTS = Path(__file__).with_name("results.json")
PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "simulated": lambda: map(simulated.row, simulated.pipelines()),
    "real": lambda: map(real.row, real.PIPELINES),
    "known": lambda: map(known.row, known.KNOWN),
}


def main(words: list[str]) -> int:
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in [word for word in words if word != "page"] or (() if words else PARTS):
        found[name] = []
        for row in PARTS[name]():
            found[name].append(row)
            print(row, flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    page.PAGE.write_text(page.page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
