"""The output of a run: prefixed lines of its processes, and a summary at the end. A terminal also shows a table below
the lines; any other output gets progress lines. This module also renders the output of `dataloaderjob status`.

`rich` is imported only in this module, when a table is drawn.
"""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from dataloaderjob.core import supervision
from dataloaderjob.core.processes import discard_output
from dataloaderjob.core.supervision import Rates
from dataloaderjob.core.texts import clean
from dataloaderjob.local.attaching import how_to_attach
from dataloaderjob.local.status import History, LiveRun
from dataloaderjob.local.verdicts import TOO_FEW, verdict_of

HELD_S = 0.1
"""Seconds within which arriving lines are written together. Otherwise, a flood of lines would redraw the table for each
line, and each redraw writes one to two thousand characters."""
HELD_CHARS = 1 << 16
WATCH_LIVE_S = 1.0
WATCH_LINES_S = 10.0
OUTPUT_LINES = 6
"""Number of terminal lines that are reserved for output above the table."""
MIN_LINES = 6
"""Minimum height of a table in lines. With fewer lines, only the title is shown."""
NONE = "-"
STYLES = {"ready": "green", "placing": "yellow", "draining": "yellow", "backoff": "red", "lost": "red"}
"""The color in which a feeder's state is shown."""
_MOVES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links
    r"|\x1b\[[0-?]*[ -/]*[@-ln-~]"  # all control sequences except colors
    r"|\x1b(?!\[)[ -/]*.?|[\x00-\x08\x0b-\x1a\x7f]"
)


class Console:
    """The output of a run: lines as they arrive and, on a terminal, a table below them. The terminal's settings are
    never changed, so this process can end without restoring them. rich.live is not used, because it hides the cursor,
    and spends 3 to 6 ms on redrawing the table for each line."""

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        *,
        env: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self.live = self._out.isatty() and self._err.isatty() and can_draw(env)
        """True if a table is shown. Both streams are then the terminal, and only one is used, to keep lines in
        order."""
        self._clock = clock
        self._below = ""
        """The table as shown on the terminal; the cursor is on the line after it."""
        self._held = ""
        """Lines that have not been written yet."""
        self._wrote_at = -HELD_S

    def line(self, who: str, text: str, is_err: bool) -> None:
        """Writes `[who] text`, or only the text if `who` is empty."""
        stream = self._err if is_err else self._out
        self._write(stream, f"[{who}] {text}" if who else text)

    def say(self, text: str) -> None:
        """Writes a line of the run itself, on stderr."""
        self._write(self._err, f"dataloaderjob: {text}")

    def show(self, *tables: Table) -> None:
        """Replaces the tables that the terminal shows with these tables."""
        width, height = shutil.get_terminal_size()
        height = (height - 1 - OUTPUT_LINES) // max(1, len(tables))
        self._draw("".join(draw_table(one, width=max(1, width - 1), height=height) for one in tables))

    def flush(self) -> None:
        """Writes held lines."""
        if self._held:
            self._draw(self._below)

    def clear(self) -> None:
        """Erases the table."""
        if self._below or self._held:
            self._draw("")

    def leave(self) -> None:
        """Leaves the table on the terminal; further output goes below it."""
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
        except UnicodeEncodeError:  # a terminal or file with another encoding
            stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
        stream.flush()
    except ValueError:  # the stream is closed
        return
    except OSError as exc:
        if exc.errno not in (errno.EPIPE, errno.EIO):  # the reader or terminal is gone; the run continues
            raise
        discard_output(stream.fileno())


class FeederRow(NamedTuple):
    """One feeder, as the text of a row."""

    feeder: str
    state: str
    since: str
    why: str


class RankRow(NamedTuple):
    """One trainer process and its pool, as the text of a row."""

    rank: str
    batches: str
    batches_per_s: str
    gb_per_s: str
    stall: str
    pool: str
    ready: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The contents of the table of one run."""

    title: str
    feeders: Sequence[FeederRow] = ()
    ranks: Sequence[RankRow] = ()
    note: str = ""

    @property
    def num_lines(self) -> int:
        return 1 + sum(bool(rows) + len(rows) for rows in (self.feeders, self.ranks)) + bool(self.note)


def table_of(job: str, history: History, *, desired: int | None = None, notes: Sequence[str] = ()) -> Table:
    """Builds the table of a run. `desired`: the number of wanted feeders, until the supervisor reports it. `notes`:
    notes to show before the supervisor's."""
    last, rates = history.last, history.rates()
    batches, gb, stall = _cells(rates)
    wanted = desired if last.desired is None else last.desired
    pools = percent(supervision.occupancy(last.receivers))
    feeders = feeder_rows(last.supervisor)
    shown = {f"{row.feeder}: {row.why}" for row in feeders}
    return Table(
        title=(
            f"{job}: feeders {last.ready}/{'?' if wanted is None else wanted}, {batches} batches/s, {gb} GB/s, "
            f"stall {stall}, pools {pools}{_stage(rates)}"
        ),
        feeders=feeders,
        ranks=rank_rows(history),
        note=note_line(
            (*notes, *(n for n in last.notes if n not in shown), _waits(last.supervisor)),
            last.supervisor.get("failures", ()),
        ),
    )


def _waits(supervisor: Mapping[str, Any]) -> str:
    """Returns the verdict if training waits for input; empty otherwise."""
    verdict = verdict_of(supervisor)
    return verdict.sentence() if verdict is not None and verdict.is_bound else ""


def feeder_rows(supervisor: Mapping[str, Any]) -> tuple[FeederRow, ...]:
    """Builds a row for each feeder in a supervisor's status."""
    return tuple(
        FeederRow(clean(f["name"]), clean(f["state"]), span(float(f["seconds"])), clean(f.get("why") or ""))
        for f in supervisor.get("feeders", ())
    )


def rank_rows(history: History) -> tuple[RankRow, ...]:
    """Builds a row for each receiver in the sidecar's last status."""
    found = sorted(history.last.receivers, key=lambda r: (len(str(r["rank"])), str(r["rank"])))
    return tuple(
        RankRow(
            str(receiver["rank"]),
            str(receiver["next_calls"]),
            *_cells(history.rates(receiver)),
            percent(supervision.occupancy([receiver])),
            str(receiver["ready"]),
        )
        for receiver in found
    )


def note_line(notes: Iterable[str], failures: Iterable[Mapping[str, Any]] = ()) -> str:
    """Formats one line: the newest failure or, without failures, the first note. The number of other failures and notes
    follows."""
    texts = [
        ": ".join(filter(None, (f"rank {f['rank']}", f.get("feeder", ""), f.get("reason", ""), f.get("text", ""))))
        for f in reversed(list(failures))
    ]  # fmt: skip
    texts += [text for text in notes if text]
    if not texts:
        return ""
    more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
    return f"{clean(texts[0])}{more}"


def span(seconds: float) -> str:
    """Formats a duration: `41 s`, `12 min`, `3 h 05`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02}"


def percent(share: float | None, digits: int = 0) -> str:
    return NONE if share is None else f"{100 * share:.{digits}f}%"


def fit_table(table: Table, height: int) -> Table:
    """Returns the table, cut to at most `height` lines. Ready feeders are omitted first."""
    if table.num_lines <= height:
        return table
    if height < MIN_LINES:
        return Table(title=table.title)
    room = height - 1 - bool(table.note) - bool(table.feeders) - bool(table.ranks)
    num_ranks = min(len(table.ranks), max(room // 2, room - len(table.feeders)))
    num_feeders = min(len(table.feeders), room - num_ranks)
    feeders, ranks = table.feeders, table.ranks
    if num_feeders < len(feeders):
        first = sorted(range(len(feeders)), key=lambda i: feeders[i].state == "ready")[: num_feeders - 1]
        left = f"and {len(feeders) - len(first)} more"
        feeders = (*(feeders[i] for i in sorted(first)), FeederRow(left, "", "", ""))
    if num_ranks < len(ranks):
        left = f"and {len(ranks) - num_ranks + 1} more"
        ranks = (*ranks[: num_ranks - 1], RankRow(left, *[""] * 6))
    return Table(title=table.title, feeders=feeders, ranks=ranks, note=table.note)


def can_draw(env: Mapping[str, str]) -> bool:
    """Returns True if a terminal with this TERM supports drawing, and `rich` is installed."""
    return (
        env.get("TERM", "dumb") not in ("", "dumb", "unknown")
        and importlib.util.find_spec("rich") is not None
    )


def draw_table(table: Table, *, width: int, height: int) -> str:
    """Returns the table as text of at most `height` lines, none wider than `width`. Colors follow TERM, COLORTERM and
    NO_COLOR."""
    from rich.console import Console as Screen
    from rich.rule import Rule
    from rich.table import Table as Grid
    from rich.text import Text

    shown = fit_table(table, height)
    text = io.StringIO()
    screen = Screen(file=text, force_terminal=True, width=width, highlight=False, legacy_windows=False)
    screen.print(Rule(Text(shown.title, style="bold", overflow="ellipsis"), align="left", style="dim"))

    def grid(rows: Sequence[tuple[str, ...]], heads: Sequence[str], wide: int | None, right: int) -> None:
        """Adds a grid of rows. `wide`: the column that fills the remaining width. Columns from `right` on contain
        numbers."""
        made = Grid(
            box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=wide is not None
        )
        for i, head in enumerate(heads):
            made.add_column(
                head, no_wrap=True, overflow="ellipsis", ratio=1 if i == wide else None,
                justify="right" if i >= right else "left",
            )  # fmt: skip
        for row in rows:
            made.add_row(*(Text(text, style=STYLES.get(text, "")) for text in row))
        screen.print(made)

    if shown.feeders:
        grid(shown.feeders, ("feeder", "state", "since", "why"), wide=3, right=9)
    if shown.ranks:
        heads = ("rank", "batches", "batches/s", "GB/s", "stall", "pool", "ready")
        grid(shown.ranks, heads, wide=None, right=1)
    if shown.note:
        screen.print(Text(shown.note, style="yellow"), no_wrap=True, overflow="ellipsis")
    return text.getvalue()


def progress_line(history: History, desired: int) -> str:
    """Formats `12.3 batches/s, 0.470 GB/s, stall 3.1%, pools 45% full, feeders 2/3`, and the time of a
    device_stage."""
    last, rates = history.last, history.rates() or Rates()
    batches, gb, stall = _cells(rates)
    pools = _fullness(last.receivers)
    feeders = f"feeders {last.ready}/{desired}"
    return f"{batches} batches/s, {gb} GB/s, stall {stall}, pools {pools}, {feeders}{_stage(rates)}"


def summary(total: Mapping[str, int], seconds: float, restarts: int) -> str:
    """Formats the line printed at the end of a run."""
    rates = supervision.between({"": {}}, {"": total}, seconds)
    parts = [
        f"{total['next_calls']} batches", f"{total['nbytes'] / 1e9:.3f} GB", f"{seconds:.1f} s",
        f"stall {percent(rates.stall, 1)}{_stage(rates)}",
    ]  # fmt: skip
    for name, text in (
        ("retries", "retried"),
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


def status_lines(run: LiveRun, history: History) -> Iterator[str]:
    """Yields a line for the run, and one for each feeder and each pool."""
    found, total = history.last, history.last.sidecar.get("totals", {})
    feeders = f"{found.ready}/{'?' if found.desired is None else found.desired}"
    yield (
        f"{run.name}: {run.home}, pid {run.about['pid']}, feeders {feeders}, "
        f"{total.get('next_calls', 0)} batches, {total.get('nbytes', 0) / 1e9:.3f} GB{_now(history.rates())}"
    )
    if (until := run.kept_until) is not None:
        is_today = time.localtime(until)[:3] == time.localtime()[:3]
        at = time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", time.localtime(until))
        yield (
            f"  available to the next script until {at} (DATALOADERJOB_KEEP); `kill {run.about['pid']}` "
            "ends it"
        )
    if (attach := run.about.get("attach")) is not None:
        here = f"{len(found.receivers)} of {attach['processes']} trainer processes attached"
        yield f"  {here}; to attach a shell: {how_to_attach(run.name)}"
    for feeder in found.supervisor.get("feeders", ()):
        why = f": {feeder['why']}" if feeder.get("why") else ""
        yield f"  {feeder['name']} {feeder['state']} for {feeder['seconds']:.0f} s{why}"
    for receiver in found.receivers:
        yield (
            f"  rank {receiver['rank']} (pid {receiver['trainer']}): {receiver['next_calls']} batches, pool "
            f"{_fullness([receiver])}, {receiver['ready']} ready{_now(history.rates(receiver))}"
        )
    if found.receivers and found.desired is not None:
        verdict = verdict_of(found.supervisor)
        yield f"  {TOO_FEW if verdict is None else verdict.sentence()}"
    told = {f"{feeder['name']}: {feeder.get('why')}" for feeder in found.supervisor.get("feeders", ())}
    for note in found.notes:
        if note not in told:
            yield f"  {note}"


def _now(rates: Rates | None) -> str:
    """Formats `, now 12.3 batches/s, 0.470 GB/s, stall 3.1 %`; empty if nothing was measured."""
    if rates is None:
        return ""
    batches, gb, stall = _cells(rates)
    return f", now {batches} batches/s, {gb} GB/s, stall {stall}"


def watch(runs: Callable[[], Sequence[LiveRun]], console: Console) -> None:
    """Shows the runs repeatedly until none is left, as tables on a terminal and as lines on any other output."""
    histories: dict[Path, History] = {}
    try:
        while found := runs():
            for run in found:
                histories.setdefault(run.home, History()).add(run.snapshot())
            if console.live:
                console.show(*(table_of(run.name, histories[run.home]) for run in found))
            else:
                for run in found:
                    for text in status_lines(run, histories[run.home]):
                        console.line("", text, False)
            time.sleep(WATCH_LIVE_S if console.live else WATCH_LINES_S)
    finally:
        console.leave()


def _stage(found: Rates | None) -> str:
    """Formats the time that device_stage takes for each batch, as `, device stage 3.1 ms`; empty without a
    device_stage."""
    return "" if found is None or found.stage_s is None else f", device stage {found.stage_s * 1e3:.1f} ms"


def _cells(found: Rates | None) -> tuple[str, str, str]:
    """Formats batches/s, GB/s and the stall as the cells of a table."""
    if found is None:
        return NONE, NONE, NONE
    return f"{found.batches_per_s:.1f}", f"{found.nbytes_per_s / 1e9:.3f}", percent(found.stall, 1)


def _fullness(receivers: Sequence[Mapping[str, Any]]) -> str:
    share = percent(supervision.occupancy(receivers))
    return share if share == NONE else f"{share} full"
