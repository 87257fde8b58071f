"""What people see of a run: lines of several processes, each with its prefix, one line of progress below them with
the metrics of the last seconds, and the answer of `dataloaderjob status`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from dataloaderjob.core import supervision
from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.core.supervision import COUNTERS, Rates, over
from dataloaderjob.local.registry import LiveRun

CLEAR = "\r\x1b[K"


class Console:
    """Lines of several processes. The progress line stays at the bottom of a terminal, else it is one like others."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self.live = self._err.isatty()
        self._progress = ""

    def line(self, who: str, text: str, is_err: bool) -> None:
        """`[who] text`, at once; without `who` the text alone."""
        stream = self._err if is_err else self._out
        self._write(stream, f"[{who}] {text}\n" if who else f"{text}\n")

    def say(self, text: str) -> None:
        """A line of the run itself, on stderr."""
        self._write(self._err, f"dataloaderjob: {text}\n")

    def progress(self, text: str) -> None:
        if not self.live:
            self.say(text)
            return
        width = shutil.get_terminal_size().columns
        self._progress = f"dataloaderjob: {text}"[: max(1, width - 1)]
        self._write(self._err, "")

    def clear(self) -> None:
        """Takes the progress line away."""
        if self._progress:
            self._progress = ""
            self._write(self._err, CLEAR)

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            if self._progress and self.live:
                self._err.write(CLEAR)
                self._err.flush()
            stream.write(text)
            stream.flush()
            if self._progress and self.live:
                self._err.write(self._progress)
                self._err.flush()
        except (BrokenPipeError, ValueError):  # the reader is gone; the run goes on
            return


@dataclass(slots=True)
class Meter:
    """Counters over the whole run. A sidecar that was started again counts from nothing again."""

    total: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    _last: dict[str, int] = field(default_factory=dict)

    def read(self, status: Mapping[str, Any]) -> None:
        """Takes a sidecar's status; an empty one says nothing."""
        if "totals" not in status:
            return
        totals = status["totals"]
        for name in COUNTERS:
            now, before = int(totals.get(name, 0)), self._last.get(name, 0)
            self.total[name] += now - before if now >= before else now
            self._last[name] = now


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics(Rates):
    """The loader over some seconds, and its feeders."""

    ready: int
    desired: int


def line(metrics: Metrics) -> str:
    """`12.3 batches/s, 0.47 GB/s, stall 3.1 %, pools 45 % full, feeders 2/2`"""
    stall = "-" if metrics.stall is None else f"{100 * metrics.stall:.1f} %"
    full = "-" if metrics.occupancy is None else f"{100 * metrics.occupancy:.0f} % full"
    return (
        f"{metrics.batches_per_s:.1f} batches/s, {metrics.nbytes_per_s / 1e9:.3f} GB/s, stall {stall}, "
        f"pools {full}, feeders {metrics.ready}/{metrics.desired}"
    )


def summary(total: Mapping[str, int], seconds: float, restarts: int) -> str:
    """One line at the end."""
    _, _, stall = over(dict.fromkeys(COUNTERS, 0), total, seconds)
    parts = [
        f"{total['next_calls']} batches", f"{total['nbytes'] / 1e9:.3f} GB", f"{seconds:.1f} s",
        f"stall {'-' if stall is None else f'{100 * stall:.1f} %'}",
    ]  # fmt: skip
    for name, text in (
        ("retries", "asked again"),
        ("hedges", "hedged"),
        ("late_copies", "late copies"),
        ("failures", "failed"),
        ("feeders_lost", "links to feeders lost"),
        ("copies", "served as copies"),
    ):
        if total[name]:
            parts.append(f"{total[name]} {text}")
    if restarts:
        parts.append(f"{restarts} restarts of parts of the service")
    return ", ".join(parts)


def lines(run: LiveRun) -> Iterator[str]:
    """One for the run, one for each feeder and each pool."""
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
    for receiver in sidecar.get("receivers", ()):
        full = supervision.occupancy([receiver])
        yield (
            f"  rank {receiver['rank']} (pid {receiver['trainer']}): {receiver['next_calls']} batches, pool "
            f"{'-' if full is None else f'{100 * full:.0f} % full'}, {receiver['ready']} ready"
        )
    for note in supervisor.get("notes", ()):
        yield f"  {note}"
