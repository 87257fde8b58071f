"""What people see of a run: lines of several processes, each with its prefix, the metrics of the last seconds (a
table below the lines on a terminal, a line now and then elsewhere), and the answer of `dataloaderjob status`.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from dataloaderjob.core import supervision
from dataloaderjob.core.supervision import COUNTERS, Rates, over
from dataloaderjob.local import table
from dataloaderjob.local.registry import LiveRun
from dataloaderjob.local.table import History, Table

HELD_S = 0.1
"""Lines that come within so short a time are written together, so that a flood of them does not draw the table anew
for each: that writes one to two thousand characters."""
HELD_CHARS = 1 << 16
WATCH_LIVE_S = 1.0
WATCH_LINES_S = 10.0
_MOVES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links
    r"|\x1b\[[0-?]*[ -/]*[@-ln-~]"  # all control sequences but colours
    r"|\x1b(?!\[)[ -/]*.?|[\x00-\x08\x0b-\x1a\x7f]"
)


class Console:
    """Lines as they come, and on a terminal a table of the run below them. Nothing of the terminal's settings is
    changed, so that it is as before however this process ends. (rich.live hides the cursor, and draws the table anew
    for each line above it: 3 to 6 ms.)"""

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        *,
        env: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self.live = self._out.isatty() and self._err.isatty() and table.can_draw(env)
        """Whether there is a table. Then both are the terminal, and all is written to one of them: in order."""
        self._clock = clock
        self._below = ""
        """The table as it stands on the terminal; the cursor is in the line after it."""
        self._held = ""
        """Lines that are not written yet."""
        self._wrote_at = -HELD_S

    def line(self, who: str, text: str, is_err: bool) -> None:
        """`[who] text`, without `who` the text alone."""
        stream = self._err if is_err else self._out
        self._write(stream, f"[{who}] {text}" if who else text)

    def say(self, text: str) -> None:
        """A line of the run itself, on stderr."""
        self._write(self._err, f"dataloaderjob: {text}")

    def show(self, *tables: Table) -> None:
        """Draws these tables in place of those before."""
        width, height = shutil.get_terminal_size()
        height = (height - 1 - table.OUTPUT_LINES) // max(1, len(tables))
        self._draw("".join(table.draw(one, width=max(1, width - 1), height=height) for one in tables))

    def flush(self) -> None:
        """Writes the lines that are held back."""
        if self._held:
            self._draw(self._below)

    def clear(self) -> None:
        """Takes the table away."""
        if self._below or self._held:
            self._draw("")

    def leave(self) -> None:
        """Has the table stand where it is, and what comes next below it."""
        self.flush()
        self._below = ""

    def _write(self, stream: TextIO, line: str) -> None:
        if not self.live:
            _put(stream, f"{line}\n")
            return
        plain = _MOVES.sub("", line)
        self._held += f"{plain}\x1b[0m\n" if "\x1b" in plain else f"{plain}\n"
        is_flood = self._clock() - self._wrote_at < HELD_S
        if not is_flood or not self._below or len(self._held) > HELD_CHARS:
            self.flush()

    def _draw(self, below: str) -> None:
        erase = f"\r\x1b[{self._below.count(chr(10))}A\x1b[J" if self._below else ""
        text = f"{erase}{self._held}{below}"
        self._held, self._below, self._wrote_at = "", below, self._clock()
        _put(self._out, text)


def _put(stream: TextIO, text: str) -> None:
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:  # a terminal or file of another encoding
            stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
        stream.flush()
    except ValueError:  # it is closed
        return
    except OSError as exc:
        if exc.errno not in (errno.EPIPE, errno.EIO):  # the reader, or the terminal, is gone; the run goes on
            raise


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
        ("feeders_lost", "feeders lost"),
        ("copies", "served as copies"),
    ):
        if total[name]:
            parts.append(f"{total[name]} {text}")
    if restarts:
        parts.append(f"{restarts} restarts of parts of the service")
    return ", ".join(parts)


def lines(run: LiveRun) -> Iterator[str]:
    """One for the run, one for each feeder and each pool."""
    found = run.snapshot()
    total = found.sidecar.get("totals", {})
    feeders = f"{found.ready}/{'?' if found.desired is None else found.desired}"
    yield (
        f"{run.job}: {run.home}, pid {run.about['pid']}, feeders {feeders}, "
        f"{total.get('next_calls', 0)} batches, {total.get('nbytes', 0) / 1e9:.3f} GB"
    )
    for feeder in found.supervisor.get("feeders", ()):
        why = f": {feeder['why']}" if feeder.get("why") else ""
        yield f"  {feeder['name']} {feeder['state']} for {feeder['seconds']:.0f} s{why}"
    for receiver in found.sidecar.get("receivers", ()):
        full = supervision.occupancy([receiver])
        yield (
            f"  rank {receiver['rank']} (pid {receiver['trainer']}): {receiver['next_calls']} batches, pool "
            f"{'-' if full is None else f'{100 * full:.0f} % full'}, {receiver['ready']} ready"
        )
    for note in found.notes:
        yield f"  {note}"


def watch(runs: Callable[[], Sequence[LiveRun]], console: Console, *, period_s: float | None = None) -> None:
    """Shows these runs again and again until there is none: as tables, or as lines where there is no terminal."""
    period_s = period_s or (WATCH_LIVE_S if console.live else WATCH_LINES_S)
    histories: dict[Path, History] = {}
    try:
        while found := runs():
            if console.live:
                for run in found:
                    histories.setdefault(run.home, History()).add(run.snapshot())
                console.show(*(table.of(run.job, histories[run.home]) for run in found))
            else:
                for run in found:
                    for text in lines(run):
                        console.line("", text, False)
            time.sleep(period_s)
    finally:
        console.leave()
