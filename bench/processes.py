"""Runs one cell in fresh processes and cleans up after it: descendants by pid, and its scratch folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import machine
from bench.plan import Cell, copies
from bench.raybox import SCRATCH

TIMEOUT_S = 150.0
GRACE_S = 8.0
"""Time for processes that a cell leaves running, such as a service that ends after its last client."""
_STARTED = "BENCH_STARTED"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def run_cell(cell: Cell) -> dict[str, Any]:
    """Returns the cell's report with `load`, `wall_s` and `left`; or {"missing": why}; or {"failed": log}."""
    # a short path, because Unix sockets are made in it
    scratch = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
    before = machine.snapshot()
    start = time.monotonic()
    try:
        outs = _run_copies(cell, scratch)
        wall_s = time.monotonic() - start
        left = machine.end_children(GRACE_S)
        load = machine.between(before, machine.snapshot())
        if any(not out.exists() for out in outs):
            return {"failed": _log_end(scratch)}
        found = _mean([json.loads(out.read_text()) for out in outs])
    finally:
        machine.end_children(0.0)
        shutil.rmtree(scratch, ignore_errors=True)
    if "missing" in found:
        return found
    figures = {f"{case}{copies(cell.processes)}": values for case, values in found["figures"].items()}
    loads = {**load.as_json(), "disturbed": load.disturbed}
    return {
        "figures": figures,
        "proof": found["proof"],
        "load": loads,
        "wall_s": round(wall_s, 2),
        "left": left,
    }


def _run_copies(cell: Cell, scratch: Path) -> list[Path]:
    spec = json.dumps({"benchmark": cell.benchmark, "party": cell.party, "case": cell.case})
    outs = [scratch / f"out-{i}.json" for i in range(cell.processes)]
    started = []
    for i, out in enumerate(outs):
        with (scratch / f"log-{i}").open("wb") as log:
            environment = {**os.environ, **_ONE_THREAD, SCRATCH: str(scratch), _STARTED: repr(time.time())}
            # pip has compiled every peer. Ours is installed editable and is compiled only if that is allowed.
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            command = [sys.executable, "-m", "bench.cell", spec, str(out)]
            started.append(
                subprocess.Popen(
                    command,
                    cwd=machine.ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
    deadline = time.monotonic() + TIMEOUT_S
    for process in started:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            (scratch / "timeout").write_text(f"stopped: not done after {TIMEOUT_S:.0f} s\n")
            machine.end_children(0.0)
            process.wait()
    return outs


def _mean(reports: list[dict[str, Any]]) -> dict[str, Any]:
    first = reports[0]
    if len(reports) == 1 or "missing" in first:
        return first
    figures = {
        case: {name: sum(r["figures"][case][name] for r in reports) / len(reports) for name in values}
        for case, values in first["figures"].items()
    }
    return {"figures": figures, "proof": first["proof"]}


def _log_end(scratch: Path, limit: int = 3000) -> str:
    return "\n".join(
        p.read_text(errors="replace")[-limit:]
        for p in sorted(scratch.glob("*"))
        if p.name in ("timeout", "log-0")
    )
