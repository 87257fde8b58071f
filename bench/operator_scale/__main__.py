"""B13, the operator at scale: `python -m bench.operator_scale [--jobs N] [--pods-per-job N] [--smoke]`."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import machine
from bench.operator_scale import claims
from bench.operator_scale.api import connected
from bench.operator_scale.cluster import Cluster, Programs, cluster
from bench.operator_scale.jobs import HEADS, TRAINERS, Shape
from bench.operator_scale.phases import SMOKE, Bench, Timing
from bench.outcome import load_of, write
from bench.run import say

PACKAGES = ("dataloaderjob", "kopf", "kubernetes", "aiohttp", "pydantic")
SMOKE_JOBS = 40


async def measure(running: Cluster, shape: Shape, timing: Timing) -> Bench:
    async with connected(running.server.url, running.server.token) as api:
        made = Bench(running, api, shape, timing)
        await made.all()
    return made


def as_json(made: Bench, programs: Programs, shape: Shape, commit: str) -> dict[str, Any]:
    """Returns results in the format of the other benchmarks. `commit` is the commit of the tree at the start."""
    facts = machine.facts()
    python = {"python": sys.version.split()[0]}
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "benchmark": claims.BENCHMARK,
        "title": f"{claims.TITLE}: {shape.jobs:,} jobs of {shape.pods_per_job} pods",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": facts["machine"],
        "versions": python | packages | programs.versions(),
        "load": load_of([record["load"] for record in made.records], again=made.again),
        "missing": {},
        "failed_cells": 0,
        "rows": claims.rows(made.figures),
        "cells": made.records,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.operator_scale", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pods-per-job", type=int, default=10, help="one head, two trainers, feeders")
    parser.add_argument(
        "--smoke", action="store_true", help=f"{SMOKE_JOBS} jobs, results to build/bench-smoke"
    )
    parser.add_argument("--folder", type=Path, help="keep logs of all processes here")
    options = parser.parse_args(arguments)
    if options.pods_per_job < HEADS + TRAINERS + 2:
        parser.error(
            f"a job needs {HEADS + TRAINERS + 2} pods at least: two of them are feeders, and one is removed"
        )
    shape = Shape(SMOKE_JOBS if options.smoke else options.jobs, options.pods_per_job)
    machine.unwind_on_signals()
    machine.adopt_orphans()
    start, commit = time.monotonic(), machine.commit()
    with tempfile.TemporaryDirectory(prefix="dataloaderjob-bench-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with cluster(folder, feeders=shape.feeders) as running:
                made = asyncio.run(measure(running, shape, SMOKE if options.smoke else Timing()))
                found = as_json(made, running.programs, shape, commit)
        except (OSError, RuntimeError, ExceptionGroup) as exc:
            say(f"failed: {exc}; {getattr(exc, 'exceptions', '')}")
            return 1
        except KeyboardInterrupt:
            say("interrupted; no results are written")
            return 130
        finally:
            machine.end_children(0.0)
    write(found, claims.FILE, smoke=options.smoke or shape != Shape(1000, 10))
    say(f"done in {(time.monotonic() - start) / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
