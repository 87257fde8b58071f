"""Runs one cell in a fresh process: `python -m bench.cell '{"benchmark": ..., "party": ..., "case": {...}}' OUT`.

Writes JSON to OUT: {"figures": {case name: {figure: number}}, "proof": {...}}, or {"missing": why}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

OURS = "ours"
MODULES = {
    "B1": "handoff",
    "B2": "transport",
    "B3": "endtoend",
    "B7": "start",
    "B8": "iterables",
    "B10": "samplers",
    "B14": "dispatcher",
    "B15": "links",
    "B16": "ranks",
    "B17": "iterables",
    "B18": "raydata",
    "B19": "pictures",
    "B20": "tables",
}


def run(benchmark: str, party: str, case: dict[str, Any]) -> dict[str, Any]:
    """Returns the cell's report. Raises what the cell raises, and NotImplementedError for a missing part of ours."""
    name = MODULES[benchmark.split()[0]]
    made = importlib.import_module(f"bench.{name}").Case(**case)
    if party == OURS:
        ours = importlib.import_module("bench.ours_start" if name == "start" else "bench.ours")
        return dict(ours.OURS[benchmark](made))
    return dict(importlib.import_module(f"bench.peers.{name}").PEERS[party](made))


def main() -> int:
    spec, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    try:
        found = run(spec["benchmark"], spec["party"], spec["case"])
    except NotImplementedError as exc:
        found = {"missing": str(exc)}
    except Exception:
        traceback.print_exc()
        return 1
    out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # peers leave threads that keep an interpreter from exiting; the figures are on disk
    os._exit(code)
