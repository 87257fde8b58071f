"""What `dataloaderjob status` says of a run."""

from __future__ import annotations

from collections.abc import Iterator

from dataloaderjob.core import rates
from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.local.registry import LiveRun


def lines(run: LiveRun) -> Iterator[str]:
    """One for the run, one for each feeder and each ring."""
    sidecar = run.sidecar()
    try:
        supervisor = run.ask({"type": "status"})
    except (OSError, DataLoaderJobError) as exc:
        supervisor = {"notes": [f"the supervisor does not answer: {exc}"]}
    total = sidecar.get("totals", {})
    feeders = f"{supervisor.get('ready', 0)}/{supervisor.get('desired', '?')}"
    yield (
        f"{run.job}: {run.home}, pid {run.about['pid']}, feeders {feeders}, "
        f"{total.get('next_calls', 0)} batches, {total.get('nbytes', 0) / 1e9:.3f} GB"
    )
    for feeder in supervisor.get("feeders", ()):
        why = f": {feeder['why']}" if feeder.get("why") else ""
        yield f"  {feeder['name']} {feeder['state']} for {feeder['seconds']:.0f} s{why}"
    for ring in sidecar.get("rings", ()):
        full = rates.occupancy([ring])
        yield (
            f"  rank {ring['rank']} (pid {ring['trainer']}): {ring['next_calls']} batches, ring "
            f"{'-' if full is None else f'{100 * full:.0f} % full'}, {ring['ready']} ready"
        )
    for note in supervisor.get("notes", ()):
        yield f"  {note}"
