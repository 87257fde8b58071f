"""Our side of B7, in a module of its own because its imports count as part of the start."""

from __future__ import annotations

import os
import signal
from typing import Any

from bench import start
from bench.raybox import SCRATCH


def measure(case: start.Case) -> dict[str, Any]:
    """Measures the private service of this machine, as started by a script by itself."""
    os.environ["DATALOADERJOB_DIR"] = os.environ.get(SCRATCH, "/tmp")
    if case.follows:
        return _next_script(case)
    from dataloaderjob import DataLoader

    def new_loader() -> Any:
        return DataLoader(
            start.Small(case), batch_size=case.batch, num_workers=case.producers,
            persistent_workers=case.persistent,
        )  # fmt: skip

    return start.measure(new_loader, case)


def _next_script(case: start.Case) -> dict[str, Any]:
    """Measures a script whose service outlived the previous script, and ends the service."""
    from dataloaderjob.local.status import live_runs

    os.environ["DATALOADERJOB_KEEP"] = "60"
    try:
        return start.measure_next_script("ours", case)
    finally:
        for run in live_runs():
            if str(run.about.get("folder", "")).startswith(os.environ["DATALOADERJOB_DIR"]):
                os.kill(run.about["pid"], signal.SIGTERM)


OURS = {"B7": measure}
