"""The charts of a report as SVG, in colors that the page's style defines. matplotlib is imported nowhere else.

Each chart is drawn twice, for wide and for narrow windows. Charts contain no text from the user.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dataloaderjob.core import timings
from dataloaderjob.local.reporting.analysis import MAKING, RECEIVING, SERVING, TRAINING, Analysis, Span

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

WIDE, NARROW = (9.2, 2.5), (3.55, 2.5)
"""Sizes of charts in inches: width and height. An inch has 96 CSS pixels."""
MOST_LINES = 8
"""Maximum number of ranks that get a line each. With more ranks, only their range and their median are drawn."""
_INK, _GRID, _MARK = "#010101", "#020202", "#030303"
_COLOURS = tuple(f"#0a000{i}" for i in range(1, 9))
_VARIABLES = {_INK: "--ink", _GRID: "--grid", _MARK: "--bad"} | {
    colour: f"--c{i}" for i, colour in enumerate(_COLOURS, 1)
}
_COLOUR = re.compile("|".join(_VARIABLES))
_ID = re.compile(r'(\bid="|href="#|url\(#)')
_STYLE: dict[RcKeyType, Any] = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 9.0, "text.color": _INK, "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": _GRID, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "lines.linewidth": 1.4, "legend.frameon": False, "legend.fontsize": 8.5, "legend.loc": "upper left",
}  # fmt: skip


Draw = Callable[[Axes, int], None]
"""A function that draws on the given axes. Its second argument is the number of columns in a legend."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart as SVG, for wide and for narrow windows."""

    wide: str
    narrow: str


def waiting(found: Analysis) -> Chart:
    """Draws the share of its time that each rank spent waiting."""

    def draw(axes: Axes, _: int) -> None:
        _lines(axes, found, lambda span: {r: 100 * w for r, w in span.waiting.items()})
        axes.set_ylim(0, 120 if len(found.ranks) > 1 else 104)
        axes.set_yticks(range(0, 101, 20))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0f}%"))
        _over_time(axes, found)

    return _chart("waiting", draw)


def ready(found: Analysis) -> Chart:
    """Draws the number of ready batches of each rank."""

    def draw(axes: Axes, _: int) -> None:
        _lines(axes, found, lambda span: {r: float(n) for r, n in span.ready.items()})
        most = max([1, *(n for span in found.spans for n in span.ready.values())])
        axes.set_ylim(0, 1.25 * most)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        _over_time(axes, found)

    return _chart("ready", draw)


def feeders(found: Analysis) -> Chart:
    """Draws the number of feeders that served, and the number wanted."""

    def draw(axes: Axes, _: int) -> None:
        spans = found.spans
        at = [span.ended for span in spans]
        axes.step(at, [s.feeders for s in spans], where="post", color=_COLOURS[0], label="serving")
        wanted = [float("nan") if s.desired is None else s.desired for s in spans]
        axes.step(at, wanted, where="post", color=_INK, linestyle="--", linewidth=1.0, label="wanted")
        top = max([1, *(s.feeders for s in spans), *(s.desired or 0 for s in spans)])
        axes.set_ylim(0, 1.3 * top)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.legend(ncols=2)
        _over_time(axes, found)

    return _chart("feeders", draw)


def build_times(found: Analysis) -> Chart:
    """Draws a histogram of the times that it took to build batches."""

    def draw(axes: Axes, _: int) -> None:
        used = [i for i, n in enumerate(found.times.buckets) if n]
        first, last = used[0], used[-1]
        rows = range(first, last + 1)
        left = [timings.begin_of(i) * 1e3 for i in rows]
        width = [timings.begin_of(i + 1) * 1e3 - begin for i, begin in zip(rows, left, strict=True)]
        axes.bar(left, [found.times.buckets[i] for i in rows], width=width, align="edge", color=_COLOURS[0])
        axes.set_xscale("log")
        axes.margins(y=0.2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda ms, _: _ms(ms)))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_ylabel("batches")
        axes.set_xlabel("time to make one batch")
        if (median := found.times.quantile(0.5)) is not None:
            axes.axvline(median * 1e3, color=_INK, linestyle="--", linewidth=1.0)
            axes.annotate(
                " half of them",
                (median * 1e3, 1.0),
                xycoords=("data", "axes fraction"),
                va="top",
                fontsize=8.5,
            )

    return _chart("build", draw)


def throughput(found: Analysis) -> Chart:
    """Draws the bytes per second that all ranks together received."""

    def draw(axes: Axes, _: int) -> None:
        at = [span.ended for span in found.spans]
        rate = [span.nbytes_per_s / 1e6 for span in found.spans]
        axes.plot(at, rate, color=_COLOURS[0])
        axes.fill_between(at, rate, color=_COLOURS[0], alpha=0.2, linewidth=0)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylabel("MB/s")
        _over_time(axes, found)

    return _chart("bytes", draw)


def cpus(found: Analysis) -> Chart:
    """Draws the number of CPUs that each group of processes kept busy."""

    def draw(axes: Axes, columns: int) -> None:
        groups = (MAKING, TRAINING, RECEIVING, SERVING)
        at = [span.ended for span in found.spans]
        rows = [[span.cpus[group] for span in found.spans] for group in groups]
        axes.stackplot(at, *rows, labels=groups, colors=_COLOURS[:4], alpha=0.85, linewidth=0)
        most = max([0.1, *(sum(column) for column in zip(*rows, strict=True))])
        if found.nears_all_cpus:
            axes.axhline(found.data.cpus, color=_INK, linestyle="--", linewidth=1.0)
            most = max(most, found.data.cpus)
        axes.set_ylim(0, 1.45 * most)
        axes.set_ylabel("CPUs")
        axes.legend(ncols=columns)
        _over_time(axes, found)

    return _chart("cpus", draw)


def _lines(axes: Axes, found: Analysis, of: Callable[[Span], Mapping[str, float]]) -> None:
    """Draws a line for each rank, or the range of many ranks."""
    rows = [of(span) for span in found.spans]
    at = [span.ended for span in found.spans]
    if len(found.ranks) <= MOST_LINES:
        for number, rank in enumerate(found.ranks):
            values = [row.get(rank, float("nan")) for row in rows]
            axes.plot(at, values, color=_COLOURS[number % len(_COLOURS)], label=f"rank {rank}")
        if len(found.ranks) > 1:
            axes.legend(ncols=4)
        return
    kept = [(t, sorted(row.values())) for t, row in zip(at, rows, strict=True) if row]
    times = [t for t, _ in kept]
    axes.fill_between(
        times, [v[0] for _, v in kept], [v[-1] for _, v in kept], color=_COLOURS[0], alpha=0.25, linewidth=0,
        label="all ranks",
    )  # fmt: skip
    axes.plot(times, [v[len(v) // 2] for _, v in kept], color=_COLOURS[0], label="middle rank")
    axes.legend(ncols=2)


def _over_time(axes: Axes, found: Analysis) -> None:
    """Turns the horizontal axis into a time axis, on which the numbers of incidents are marked."""
    axes.set_xlim(0, max(1.0, found.last.at))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: _seconds(s)))
    for number, incident in enumerate(found.incidents[:20], 1):
        axes.axvline(incident.event.at, color=_MARK, linewidth=1.2)
        axes.annotate(
            str(number), (incident.event.at, 1.0), xycoords=("data", "axes fraction"), color=_MARK, va="bottom",
            ha="center", fontsize=9, fontweight="bold",
        )  # fmt: skip


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _ms(ms: float) -> str:
    return f"{ms:g} ms" if ms < 1000 else f"{ms / 1000:g} s"


def _chart(name: str, draw: Draw) -> Chart:
    return Chart(_svg(f"{name}-wide", draw, WIDE), _svg(f"{name}-narrow", draw, NARROW))


def _svg(name: str, draw: Draw, size: Sequence[float]) -> str:
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(size[0], size[1]), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.subplots(), 4 if size is WIDE else 2)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = _COLOUR.sub(lambda match: f"var({_VARIABLES[match[0]]})", text)
    return _ID.sub(lambda match: f"{match[1]}{name}-", text)  # a page's charts need distinct IDs
