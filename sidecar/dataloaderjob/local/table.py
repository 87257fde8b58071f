"""The table of a run on a terminal: rows made of what sidecar and supervisor report, and their text at a given size.

No I/O. `rich` is imported when a table is drawn, and nowhere else in the package.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dataloaderjob.core import supervision
from dataloaderjob.core.supervision import Rates
from dataloaderjob.local.poller import Snapshot

WINDOW_S = 5.0
"""Rates are those of so many seconds: over one second a few large batches jump up and down."""
OUTPUT_LINES = 6
"""Lines of a terminal that are left to what is printed above the table."""
MIN_LINES = 6
"""Less has no room for a row of each kind: then only the title is shown."""
NONE = "-"
STYLES = {"ready": "green", "placing": "yellow", "draining": "yellow", "backoff": "red", "lost": "red"}
"""The colour of a feeder in this state."""


class FeederRow(NamedTuple):
    """One feeder, as text."""

    feeder: str
    state: str
    since: str
    why: str


class RankRow(NamedTuple):
    """One trainer process and its pool, as text."""

    rank: str
    batches: str
    batches_per_s: str
    gb_per_s: str
    stall: str
    pool: str
    ready: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What is shown of one run."""

    title: str
    feeders: Sequence[FeederRow] = ()
    ranks: Sequence[RankRow] = ()
    note: str = ""

    @property
    def num_lines(self) -> int:
        return 1 + sum(bool(rows) + len(rows) for rows in (self.feeders, self.ranks)) + bool(self.note)


class History:
    """The last snapshots of one run: two of them make a rate."""

    def __init__(self) -> None:
        self.last = Snapshot(at=-math.inf)
        self._kept: deque[Snapshot] = deque()

    def add(self, snapshot: Snapshot) -> None:
        """Takes a snapshot, or the same one again."""
        if snapshot.at <= self.last.at:
            return
        self.last = snapshot
        if "totals" not in snapshot.sidecar:
            return
        if self._kept and _taken(snapshot) < _taken(self._kept[-1]):  # the sidecar has started again
            self._kept.clear()
        self._kept.append(snapshot)
        while len(self._kept) > 2 and self._kept[1].at <= snapshot.at - WINDOW_S:
            self._kept.popleft()

    @property
    def job(self) -> Rates | None:
        """The rates of the whole run; None where there are no two readings."""
        if len(self._kept) < 2:
            return None
        first, last = self._kept[0], self._kept[-1]
        return supervision.between(
            {"": first.sidecar["totals"]}, {"": last.sidecar["totals"]}, last.at - first.at
        )

    def rank(self, receiver: Mapping[str, Any]) -> Rates | None:
        """The rates of one rank, by its entry in the sidecar's last status; None where it has only that one."""
        for snapshot in list(self._kept)[:-1]:
            for before in snapshot.sidecar.get("receivers", ()):
                if _key(before) == _key(receiver):
                    return supervision.between({"": before}, {"": receiver}, self._kept[-1].at - snapshot.at)
        return None


def of(job: str, history: History, *, desired: int | None = None, notes: Sequence[str] = ()) -> Table:
    """What is shown of a run. `desired`: feeders that are wanted, where the supervisor has not told it yet; `notes`:
    shown before the supervisor's.
    """
    last, (batches, gb, stall) = history.last, _cells(history.job)
    wanted = desired if last.desired is None else last.desired
    pools = percent(supervision.occupancy(last.sidecar.get("receivers", ())))
    feeders = feeder_rows(last.supervisor)
    shown = {f"{row.feeder}: {row.why}" for row in feeders}
    return Table(
        title=(
            f"{job}: feeders {last.ready}/{'?' if wanted is None else wanted}, {batches} batches/s, {gb} GB/s, "
            f"stall {stall}, pools {pools}"
        ),
        feeders=feeders,
        ranks=rank_rows(history),
        note=note((*notes, *(n for n in last.notes if n not in shown)), last.supervisor.get("failures", ())),
    )


def feeder_rows(supervisor: Mapping[str, Any]) -> tuple[FeederRow, ...]:
    """One for each feeder of a supervisor's status."""
    return tuple(
        FeederRow(str(f["name"]), str(f["state"]), span(float(f["seconds"])), _one_line(f.get("why") or ""))
        for f in supervisor.get("feeders", ())
    )


def rank_rows(history: History) -> tuple[RankRow, ...]:
    """One for each receiver of the sidecar's last status."""
    found = sorted(
        history.last.sidecar.get("receivers", ()), key=lambda r: (len(str(r["rank"])), str(r["rank"]))
    )
    return tuple(
        RankRow(
            str(receiver["rank"]),
            str(receiver["next_calls"]),
            *_cells(history.rank(receiver)),
            percent(supervision.occupancy([receiver])),
            str(receiver["ready"]),
        )
        for receiver in found
    )


def note(notes: Iterable[str], failures: Iterable[Mapping[str, Any]] = ()) -> str:
    """One line: the newest failure before all notes, and how many more there are."""
    texts = [
        ": ".join(filter(None, (f"rank {f['rank']}", f.get("feeder", ""), f.get("reason", ""), f.get("text", ""))))
        for f in reversed(list(failures))
    ]  # fmt: skip
    texts += [text for text in notes if text]
    if not texts:
        return ""
    more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
    return f"{_one_line(texts[0])}{more}"


def span(seconds: float) -> str:
    """`41 s`, `12 min`, `3 h 05`"""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02}"


def percent(share: float | None, digits: int = 0) -> str:
    return NONE if share is None else f"{100 * share:.{digits}f} %"


def fit(table: Table, height: int) -> Table:
    """The same in at most `height` lines. Feeders that are not ready are the last to go."""
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
        ranks = (*ranks[: num_ranks - 1], RankRow(left, "", "", "", "", "", ""))
    return Table(title=table.title, feeders=feeders, ranks=ranks, note=table.note)


def can_draw(env: Mapping[str, str]) -> bool:
    """Whether a terminal of this TERM can be drawn on, and there is something to draw with."""
    return (
        env.get("TERM", "dumb") not in ("", "dumb", "unknown")
        and importlib.util.find_spec("rich") is not None
    )


def draw(table: Table, *, width: int, height: int) -> str:
    """Whole lines, none wider than `width`. Colour is as TERM, COLORTERM and NO_COLOR say."""
    from rich.console import Console
    from rich.rule import Rule
    from rich.table import Table as Grid
    from rich.text import Text

    shown = fit(table, height)
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=width, highlight=False, legacy_windows=False)
    console.print(Rule(Text(shown.title, style="bold", overflow="ellipsis"), align="left", style="dim"))

    def grid(rows: Sequence[tuple[str, ...]], heads: Sequence[str], wide: int | None, right: int) -> None:
        """`wide`: the column that takes what room there is; columns from `right` on are numbers."""
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
        console.print(made)

    if shown.feeders:
        grid(shown.feeders, ("feeder", "state", "since", "why"), wide=3, right=9)
    if shown.ranks:
        heads = ("rank", "batches", "batches/s", "GB/s", "stall", "pool", "ready")
        grid(shown.ranks, heads, wide=None, right=1)
    if shown.note:
        console.print(Text(shown.note, style="yellow"), no_wrap=True, overflow="ellipsis")
    return text.getvalue()


def _cells(found: Rates | None) -> tuple[str, str, str]:
    """Batches/s, GB/s and stall."""
    if found is None:
        return NONE, NONE, NONE
    return f"{found.batches_per_s:.1f}", f"{found.nbytes_per_s / 1e9:.3f}", percent(found.stall, 1)


def _taken(snapshot: Snapshot) -> int:
    return int(snapshot.sidecar["totals"].get("next_calls", 0))


def _key(receiver: Mapping[str, Any]) -> tuple[Any, Any]:
    """A trainer that has started again counts from nothing again."""
    return receiver["rank"], receiver["trainer"]


def _one_line(text: str) -> str:
    """Replaces what would move the cursor, line ends too, by a space."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
